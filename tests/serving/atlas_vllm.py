"""Make an atlas with vLLM and one with transformers; print the largest difference.

python atlas_vllm.py FOLDER
"""

import json
import os
import random
import sys
from pathlib import Path

import numpy as np
from served_model import save_model

from regard.atlas.job import run_atlas
from regard.atlas.runners import RunnerOptions
from regard.atlas.settings import Settings
from regard.atlas.table import read_table

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "watch-vllm.md"
NAME = '"HuggingFaceTB/SmolLM2-135M-Instruct"'


def write_module(folder):
    """Write the module of the page, with a small model instead of its own."""
    start = PAGE.read_text("utf-8").index("# served.py")
    code = PAGE.read_text("utf-8")[start:].partition("```")[0]
    small = f'"{folder / "model"}", dtype="float32", max_model_len=128'
    (folder / "served.py").write_text(code.replace(NAME, small))


def main(folder):
    """Run both, over texts of 10 to 60 words."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GB, instead of all memory
    save_model(folder / "model")
    write_module(folder)
    rng = random.Random(0)
    texts = (
        " ".join(f"w{rng.randrange(509)}" for _ in range(n)) for n in range(10, 61)
    )
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    sys.path.insert(0, str(folder))
    tables = []
    for name, model in (("vllm", "served:open_llm"), ("torch", str(folder / "model"))):
        plan = Settings(model=model, corpus=(str(folder / "texts.jsonl"),), length=48)
        run_atlas(folder / name, crew=RunnerOptions(runner="loop"), plan=plan)
        tables.append(read_table(folder / name))
    worst = {
        x: float(np.nanmax(np.abs(tables[0].mean(x) - tables[1].mean(x))))
        for x in tables[0].statistics
    }
    counts = [int(x.count("entropy").max()) for x in tables]
    found = {"worst": worst, "documents": counts, "layers": tables[0].layers}
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
