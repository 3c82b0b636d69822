"""Options that several commands share, so that one name means the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Model directory, GGUF file, or a bundled model's name.")]
Mesh = Annotated[str, typer.Option(help='Axis sizes ("dp=2,tp=4"), a preset\'s name, or the path of a mesh TOML.')]
Platform = Annotated[str | None, typer.Option(help="cpu, gpu or tpu; default: an accelerator where there is one.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; default: float32 on a CPU, else bfloat16.")
]
RebalanceEvery = Annotated[
    int, typer.Option(help="Move experts by their loads every so many steps, with --expert-slots; 0: never.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

Prompts = Annotated[list[str] | None, typer.Option("--prompt", metavar="TEXT", help="A prompt; repeat it for several.")]
PromptFile = Annotated[
    Path | None, typer.Option(help='One prompt a line; in a .jsonl file, {"prompt": "..."} a line.', metavar="FILE")
]
TokenIds = Annotated[
    list[str] | None,
    typer.Option("--token-ids", metavar="IDS", help='A prompt as token ids, "1,2,3"; repeat it for several.'),
]
