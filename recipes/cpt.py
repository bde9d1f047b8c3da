# /// script
# requires-python = ">=3.11"
# dependencies = ["mini-rome"]
# ///
"""Continual pre-training of a tiny Mixture-of-Experts model in the paper's two stages, by held-out loss.

What differs from plain language-model training:
  1. stage 1 is code-centric: find the faulty line, repair it, write a test that fails; then reasoning and tool text;
  2. stage 2 is trajectories of teachers in sandboxes, what the environment wrote included;
  3. the learning rate is constant, the weight decay falls linearly in stage 2, the batch is counted in tokens.

Commands:
  one CPU, two minutes   python recipes/cpt.py
  on a dataset           python recipes/cpt.py --data runs/data-.../dataset
  the paper's schedule   python recipes/cpt.py --config recipes/configs/cpt.yaml   (its sizes need a cluster)
  then                   python recipes/sft.py --stage 1 --data runs/data-.../dataset --model runs/latest/cpt
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads slow every neighbour

from dataclasses import asdict  # noqa: E402

from mini_rome.data.cpt import CHUNKS, CPTArguments, LinearDecay, code_rows, heldout_loss, take, trajectory_rows  # noqa: E402
from mini_rome.data.demonstrations import expert_trajectories, make_tasks  # noqa: E402
from mini_rome.data.staged import fit, save, start_model  # noqa: E402
from mini_rome.data.stages import open_dataset  # noqa: E402
from mini_rome.model import build_tokenizer  # noqa: E402
from mini_rome.options import OptionsParser, guarded  # noqa: E402
from mini_rome.progress import Display  # noqa: E402
from mini_rome.runs import SUMMARY, checkpoint, new_run, provenance, write_json  # noqa: E402
from mini_rome.sandbox import Pool, resolve  # noqa: E402
from mini_rome.trace import ChatFormat  # noqa: E402


def main() -> None:
    (a,) = OptionsParser(__doc__, (CPTArguments,), own=(CPTArguments,)).parse()
    display = Display()
    backend, why = resolve(a.sandbox)
    given = None if a.data is None else open_dataset(a.data)
    if a.model is not None:
        checkpoint(a.model)
    folder = new_run(kind="cpt")
    display.line(f"run: {folder}")

    # Text: stage 1 is made from a seed, stage 2 is a dataset or made on the spot. Some rows of each are held out.
    if given is not None:
        chat, trajectories = given
    else:
        display.line(why)
        chat = ChatFormat(build_tokenizer(a.families))
        tasks = make_tasks(a.families, CHUNKS, max(400, int(a.stage2_tokens // 150)), "train", a.seed)
        with Pool(backend, size=32) as pool, display.stage("trajectories", len(tasks)) as update:
            trajectories = expert_trajectories(chat, pool, tasks, 0.15, a.seed, update)
    code, code_heldout = take(code_rows(chat, a.families, a.stage1_tokens, a.length, a.seed), a.heldout_rows)
    episodes, episodes_heldout = take(trajectory_rows(trajectories, a.length), a.heldout_rows)

    # Two stages of next-token training.
    model = start_model(a.model, chat, a.seed)
    losses, speeds = {}, {}

    def measure(when: str) -> None:
        heldout = {"code": code_heldout, "trajectories": episodes_heldout}
        losses[when] = {name: heldout_loss(model, rows) for name, rows in heldout.items()}
        shown = ", ".join(f"{name} {value:.3f}" for name, value in losses[when].items())
        display.line(f"held-out loss {when} (nats a token): {shown}")

    measure("before")
    config = a.config(str(folder / "trainer-1"), a.stage1_tokens, a.decay_from)
    speeds["stage 1"] = fit(model, chat.tokenizer, code, config, display, "CPT, stage 1")
    measure("after stage 1")
    config = a.config(str(folder / "trainer-2"), a.stage2_tokens, a.decay_from)
    falling = LinearDecay(a.decay_from, a.decay_to)
    speeds["stage 2"] = fit(model, chat.tokenizer, episodes, config, display, "CPT, stage 2", [falling])
    measure("after stage 2")

    save(model, chat.tokenizer, folder / "cpt")
    facts = {**provenance(backend, "none", a.seed), "options": asdict(a), "heldout_loss": losses}
    write_json(folder / SUMMARY, {**facts, "tokens_per_s": speeds, "seconds": display.seconds})
    display.line(f"model: {folder / 'cpt'}")


if __name__ == "__main__":
    guarded(main)
