"""examples/train.py: it learns through octavo's attention what it learns through PyTorch's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

for package in ("rich", "tokenizers", "torch"):
    pytest.importorskip(package, reason=f"examples/train.py needs {package}")

import torch  # noqa: E402
import train  # noqa: E402
from gpt.generation import generate  # noqa: E402
from gpt.training import autocast  # noqa: E402

from conftest import gpu_count  # noqa: E402
from support.small_gpt import (  # noqa: E402
    EXAMPLES,
    MODEL,
    SETTINGS,
    SHORT,
    Batch,
    Processes,
    Text,
    Trainer,
    get_documents,
    get_text,
    interrupted,
    logits,
    recompute,
    trained,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def text() -> Text:
    return get_text()


@pytest.fixture(scope="module")
def by_octavo(text: Text) -> tuple[Trainer, list[float]]:
    return trained(SETTINGS)


def test_it_learns(text: Text, by_octavo: tuple[Trainer, list[float]]) -> None:
    trainer, losses = by_octavo
    assert losses[0] == pytest.approx(np.log(MODEL.vocabulary), abs=0.2)  # every token as likely as another
    assert trainer.held_out_loss() < text.unigram_loss - 0.4


def test_it_learns_what_it_learns_with_eager_attention(by_octavo: tuple[Trainer, list[float]]) -> None:
    """The same but for rounding, which is far less than what another seed changes."""
    trainer, losses = by_octavo
    eager, of_eager = trained(replace(SETTINGS, attention="eager"))
    _, of_other_seed = trained(replace(SETTINGS, seed=1))
    noise = np.abs(np.subtract(losses, of_other_seed)).mean()
    assert np.abs(np.subtract(losses, of_eager)).max() < 0.01 < 0.05 < noise
    assert trainer.held_out_loss() == pytest.approx(eager.held_out_loss(), abs=0.005)


def test_sampling_with_the_weights_that_were_trained(
    text: Text, by_octavo: tuple[Trainer, list[float]]
) -> None:
    model = by_octavo[0].model
    prompt = text.encode("numpy.").tolist()
    assert model.training
    [new] = generate(model, [prompt], 80)  # beyond the context, as ALiBi can
    assert new == recompute(model.eval(), prompt, 80)
    model.train()
    stop = new[20]
    [stopped] = generate(model, [prompt], 80, stop_token=stop)
    assert stopped == new[: new.index(stop) + 1]


def test_learning_rate() -> None:
    settings = replace(SETTINGS, steps=110, warmup_steps=10, learning_rate=1.0)
    rates = [settings.learning_rate_at(step) for step in range(111)]
    assert rates[:10] == pytest.approx(np.arange(1, 11) / 10)
    assert np.all(np.diff(rates[10:]) < 0)
    assert rates[10] == 1 and rates[60] == pytest.approx(0.55) and rates[110] == pytest.approx(0.1)


def test_gradients_are_clipped(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(replace(SHORT, max_norm=0.25), text, Processes("cpu"))
    norms = []

    def step(self: torch.optim.Optimizer) -> None:
        gradients = [p.grad.flatten() for group in self.param_groups for p in group["params"]]
        norms.append(float(torch.cat(gradients).norm()))

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    reports = list(trainer.run())
    assert min(report.gradient_norm for report in reports) > 0.3
    assert norms == pytest.approx([0.25] * SHORT.steps, rel=1e-3)


def test_reports_of_several_steps(text: Text) -> None:
    _, losses = trained(SHORT)
    reports = list(Trainer(SHORT, text, Processes("cpu")).run(report_every=4))
    assert [report.step for report in reports] == [4, 6]
    assert [report.loss for report in reports] == pytest.approx([np.mean(losses[:4]), np.mean(losses[4:])])


def test_bfloat16() -> None:
    trainer, losses = trained(replace(SHORT, dtype="bfloat16"))
    _, of_float32 = trained(SHORT)
    assert losses != of_float32
    assert losses == pytest.approx(of_float32, abs=0.02)
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    tokens = generate(trainer.model, [[0]], 5, dtype="bfloat16")
    assert [len(new) for new in tokens] == [5]


# Checkpoints


def state_of(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def assert_same(one: Any, other: Any) -> None:
    """Every bit of two checkpoints."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


@pytest.mark.parametrize("alibi", [False, True])
def test_a_run_goes_on_with_the_same_bits(tmp_path: Path, alibi: bool) -> None:
    settings = replace(SHORT, model=replace(MODEL, alibi=alibi, dropout=0.2))
    trainer, losses = trained(settings)
    trainer.save(tmp_path / "straight.pt")
    resumed, losses_in_parts = interrupted(settings, tmp_path / "part.pt")
    assert losses == losses_in_parts
    resumed.save(tmp_path / "resumed.pt")
    assert_same(state_of(tmp_path / "straight.pt"), state_of(tmp_path / "resumed.pt"))
    assert list(resumed.run()) == []


def test_a_checkpoint_is_written_at_once_or_not_at_all(
    text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.pt"
    trainer = Trainer(SHORT, text, Processes("cpu"))
    trainer.save(path)
    before = path.read_bytes()
    save = torch.save

    def save_half(state: Any, file: Any) -> None:
        save(state, file)
        file.truncate(file.tell() // 2)
        raise OSError("No space left on device")

    next(trainer.run())
    monkeypatch.setattr(torch, "save", save_half)
    with pytest.raises(OSError, match="No space left"):
        trainer.save(path)
    assert path.read_bytes() == before
    monkeypatch.undo()
    trainer.save(path)
    assert state_of(path)["step"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_checkpoint_is_refused(text: Text, tmp_path: Path) -> None:
    torch.save({"weights": 1}, tmp_path / "other.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "half.pt").write_bytes((tmp_path / "other.pt").read_bytes()[:100])
    trainer = Trainer(SHORT, text, Processes("cpu"))
    for name, message in (
        ("empty.pt", "torch.load cannot read it"),
        ("text.pt", "torch.load cannot read it"),
        ("half.pt", "torch.load cannot read it"),
        ("other.pt", "a checkpoint of this program is expected"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            trainer.load(tmp_path / name)


def test_other_runs_checkpoints_are_refused(text: Text, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    Trainer(SHORT, text, Processes("cpu")).save(path)
    other = replace(SHORT, model=replace(MODEL, num_heads=4))
    with pytest.raises(ValueError, match=r"run.pt: the checkpoint has num_heads 2, and this run 4"):
        Trainer(other, text, Processes("cpu")).load(path)
    with pytest.raises(ValueError, match=r"run.pt: the checkpoint has text '\w{64}', and this run '\w{64}'"):
        Trainer(SHORT, Text(get_documents()[5:], MODEL.vocabulary), Processes("cpu")).load(path)


# Several processes


def torchrun(program: Path, *arguments: str, processes: int, **environment: str) -> str:
    module = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [sys.executable, *module, str(program), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    return done.stdout + done.stderr


def test_two_processes(text: Text, tmp_path: Path) -> None:
    """They do what one does with as many rows, but for the order of sums, and go on with the same bits."""
    worker = Path(__file__).with_name("support") / "train_worker.py"
    said = torchrun(worker, str(tmp_path), processes=2, CUDA_VISIBLE_DEVICES="")
    assert "octavo attention, float32, 2 x cpu" in said
    assert said.count("step 2: loss") == said.count("loss on held-out text") == 1  # by the first process
    # In a process too: SciPy, which other tests import, adds to a docstring of NumPy, hence to the text.
    alone = tmp_path / "alone"
    alone.mkdir()
    torchrun(worker, str(alone), processes=1, CUDA_VISIBLE_DEVICES="")
    of_two, of_one = (json.loads((folder / "losses.json").read_text("utf-8")) for folder in (tmp_path, alone))
    assert of_two == pytest.approx(of_one, abs=1e-5)
    single, parallel = (state_of(folder / "parallel.pt")["model"] for folder in (alone, tmp_path))
    for name, weight in single.items():
        if name.endswith("qkv.bias"):
            # No softmax depends on the bias of keys: its gradient is rounding, which AdamW scales up.
            weight.view(3, -1)[1] = parallel[name].view(3, -1)[1]
        torch.testing.assert_close(parallel[name], weight, rtol=0, atol=1e-5)
    assert_same(state_of(tmp_path / "straight.pt"), state_of(tmp_path / "resumed.pt"))
    with pytest.raises(ValueError, match=r"parallel.pt: the checkpoint has processes 2, and this run 1"):
        Trainer(SHORT, text, Processes("cpu")).load(tmp_path / "parallel.pt")


# The script


def test_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.pt"
    arguments = ["--rows", "2", "--max-tokens", "5", "--device", "cpu", "--checkpoint", str(path)]
    arguments += ["--steps", "3", "--save-every", "2", "--report-every", "1", "--prompt", "numpy.sum"]
    train.main(arguments)
    said = capfd.readouterr()
    assert "octavo attention, float32, 1 x cpu" in said.err
    assert [line.split(":")[0] for line in said.err.splitlines()[1:]] == ["step 1", "step 2", "step 3"]
    assert "loss on held-out text: " in said.out and "\nnumpy.sum" in said.out
    assert state_of(path)["step"] == 3
    train.main(arguments)  # nothing is left to train
    again = capfd.readouterr()
    assert f"{path}: goes on after step 3" in again.err
    assert again.out == said.out
    with pytest.raises(
        SystemExit, match=r"train.py: .*run.pt: the checkpoint has attention 'octavo', and this run"
    ):
        train.main([*arguments, "--attention", "eager"])
    with pytest.raises(
        SystemExit, match=r"train.py: a prompt and its new tokens .* exceed the model's context"
    ):
        train.main([*arguments, "--max-tokens", "128"])
    capfd.readouterr()
    with pytest.raises(SystemExit, match=r"train.py: Sampling: temperature \(-1.0\) must be finite and"):
        train.main([*arguments, "--temperature", "-1"])
    assert "loss" not in capfd.readouterr().out  # it is said before the training


@pytest.mark.gpu
def test_on_a_gpu(text: Text, tmp_path: Path) -> None:
    settings = replace(SETTINGS, dtype="bfloat16")
    runs = [trained(replace(settings, attention=name), Processes("cuda")) for name in ("octavo", "eager")]
    (trainer, losses), (_, of_eager) = runs
    assert losses == pytest.approx(of_eager, abs=0.2)
    assert np.mean(losses[-20:]) == pytest.approx(np.mean(of_eager[-20:]), abs=0.03)
    assert trainer.held_out_loss() < text.unigram_loss - 0.4

    prompt = text.encode("numpy.").tolist()
    [new] = generate(trainer.model, [prompt], 50, dtype="bfloat16")
    tokens = torch.tensor(prompt + new, device="cuda")
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32, device="cuda")
    positions = torch.arange(len(tokens), device="cuda")
    with torch.no_grad(), autocast(tokens.device, "bfloat16"):
        of_whole = logits(trainer.model.eval(), Batch(tokens, tokens, positions, ends, len(tokens)))
    of_new = of_whole[len(prompt) - 1 : -1].float()
    chosen = of_new.gather(1, tokens[len(prompt) :, None])[:, 0]
    assert (of_new.amax(-1) - chosen).max() < 0.25  # the likeliest, but for rounding

    short = replace(SHORT, model=replace(MODEL, dropout=0.2), dtype="bfloat16")
    _, straight = trained(short, Processes("cuda"))
    _, in_parts = interrupted(short, tmp_path / "part.pt", Processes("cuda"))
    assert straight == pytest.approx(in_parts, abs=0.02)
    with pytest.raises(SystemExit, match="float16 and bfloat16, not float32"):
        train.main(["--device", "cuda", "--dtype", "float32"])


@pytest.mark.gpu
def test_script_on_gpus() -> None:
    """Two where there are two; one still goes through NCCL."""
    processes = min(2, gpu_count())
    said = torchrun(EXAMPLES / "train.py", "--steps", "4", "--max-tokens", "5", processes=processes)
    assert f"octavo attention, bfloat16, {processes} x cuda" in said
