# /// script
# requires-python = ">=3.11"
# dependencies = ["mini-rome"]
# ///
"""Masked supervised fine-tuning of a tiny Mixture-of-Experts agent on trajectories (paper, eqs. 1-2), in two stages.

What differs from plain SFT:
  1. trajectories are run in the sandbox, with injected mistakes and the recoveries after them;
  2. whole turns whose call or execution failed, or that do not serve the task, stay in context and out of the loss;
  3. what the environment wrote is never trained, the stop token of a kept response is;
  4. stage 1 takes all that the filter let through, stage 2 the best trajectories of what the model still gets wrong.

Commands:
  one CPU, two minutes   python recipes/sft.py
  on a dataset           python recipes/sft.py --stage 1 --data runs/data-.../dataset
  then stage 2           python recipes/sft.py --stage 2 --data runs/data-.../dataset --model runs/latest/sft
  longer tasks           python recipes/sft.py --sft_chunks 1 2 3 4 --sft_steps 800
  two processes          torchrun --nproc_per_node 2 recipes/sft.py
  then                   python recipes/ipa.py --model runs/latest/sft
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads slow every neighbour

from mini_rome.arguments import RunArguments  # noqa: E402
from mini_rome.config import IPAConfig  # noqa: E402
from mini_rome.data.staged import StageArguments, train_stage  # noqa: E402
from mini_rome.options import OptionsParser, guarded  # noqa: E402
from mini_rome.pipeline import Run  # noqa: E402


def main() -> None:
    parser = OptionsParser(__doc__, (RunArguments, StageArguments, IPAConfig), own=(RunArguments, StageArguments))
    arguments, stage, args = parser.parse()
    if stage.data is not None:
        train_stage(arguments, stage, args)
        return
    with Run(arguments, args, kind="sft") as run:
        short_test, long_test = run.tasks("test", arguments.sft_chunks), run.tasks("test", arguments.chunks)
        run.build_model()
        run.evaluate("untrained", short_test, arguments.sft_chunks)
        run.sft()
        run.evaluate("sft_short", short_test, arguments.sft_chunks)
        run.evaluate("sft", long_test)
        run.save_model("sft")
        run.report()


if __name__ == "__main__":
    guarded(main)
