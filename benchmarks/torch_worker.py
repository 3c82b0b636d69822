"""transformers with torch, driven over a pipe: one JSON request a line in, one JSON reply a line out.

Runs in an interpreter of its own that has torch and transformers and needs nothing of jaxpar:

    python torch_worker.py MODEL_DIR THREADS

PyTorch runs eagerly, as transformers does unless told otherwise. A loop of our own stands in for its `generate`, whose
bookkeeping would cost it more.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from typing import Any

import torch
import transformers

ATTENTION = ("sdpa", "eager")


class Worker:
    """The model in every dtype that was asked for, and the attention that is fastest for each kind of work."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._models: dict[str, Any] = {}
        self._ended = time.process_time()

    def versions(self) -> dict[str, str]:
        """What is being measured."""
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def generate(self, dtype: str, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens after a prompt."""
        model, tokens = self._model(dtype), []
        with torch.inference_mode():
            output = _prefill(model, torch.tensor([prompt]))
            for _ in range(count):
                tokens += output.logits[:, -1].argmax(-1).tolist()
                output = _decode(model, output)
        return tokens

    def fastest_attention(self, **work: Any) -> str:
        """The faster of torch's fused attention and the plain one, each run twice."""
        seconds = {name: min(self.run(attention=name, **work)["seconds"] for _ in range(2)) for name in ATTENTION}
        return min(seconds, key=lambda name: seconds[name])

    def run(self, dtype: str, attention: str, prompts: list[list[int]], steps: int) -> dict[str, float]:
        """Wall-clock seconds of the prefill or, with `steps`, of as many decode steps after it.

        `idle_cpu_seconds` is what this process has used of the cores since its last turn ended.
        """
        idle = time.process_time() - self._ended
        model = self._model(dtype)
        model.set_attn_implementation(attention)
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            start = time.perf_counter()
            output = _prefill(model, tokens)
            output.logits[:, -1].argmax(-1).tolist()
            if steps:
                start = time.perf_counter()
            for _ in range(steps):
                output = _decode(model, output)
                output.logits[:, -1].argmax(-1).tolist()
            seconds = time.perf_counter() - start
        self._ended = time.process_time()
        return {"seconds": seconds, "idle_cpu_seconds": idle}

    def _model(self, dtype: str) -> Any:
        if dtype not in self._models:
            load = transformers.AutoModelForCausalLM.from_pretrained
            self._models[dtype] = load(self._directory, dtype=getattr(torch, dtype)).eval()
        return self._models[dtype]


def _prefill(model: Any, tokens: torch.Tensor) -> Any:
    """Prompts [B, T] -> logits of their last tokens, and the cache."""
    return model(tokens, use_cache=True, logits_to_keep=1)


def _decode(model: Any, output: Any) -> Any:
    """The greedy tokens of `output`, put through the model with its cache, which has one name or another."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(output.logits[:, -1:].argmax(-1), use_cache=True, **{name: output[name]})


def main() -> None:
    """Answer requests, {"call": name of a method, "with": its arguments}, until the pipe closes."""
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(int(sys.argv[2]))
    worker = Worker(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        reply = getattr(worker, request["call"])(**request["with"])
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
