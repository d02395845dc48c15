"""What test_train.py has two processes do, which torchrun starts with a folder to write to."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[3] / "examples")]

import train  # of the examples

from support.small_gpt import MODEL, SHORT, Processes, interrupted, trained


def main(folder: Path) -> None:
    with Processes("cpu") as processes:
        script = train.parse_arguments(["--steps", "2", "--report-every", "1", "--max-tokens", "5"])
        train.train(script, processes)
        trainer, losses = trained(SHORT, processes)
        trainer.save(folder / "parallel.pt")
        with_dropout = replace(SHORT, model=replace(MODEL, dropout=0.2))
        trained(with_dropout, processes)[0].save(folder / "straight.pt")
        interrupted(with_dropout, folder / "part.pt", processes)[0].save(folder / "resumed.pt")
        if processes.index == 0:
            (folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
