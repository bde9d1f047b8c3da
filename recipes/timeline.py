# /// script
# requires-python = ">=3.11"
# dependencies = ["mini-rome"]
# ///
"""Where the time of a step goes, three ways to divide it between rollouts and training (the paper's figure 3, small).

  1. sync         rollouts, then training, in turn                              --async_ratio 0
  2. ahead        the next step's rollouts in a thread, beside training         --async_ratio 1
  3. multiplexed  the same, but sampler and optimiser take turns on the device  --async_ratio 1 --multiplex true

Every way trains the same model on the same tasks for --max_steps steps and records its spans (`timeline.csv`).

Commands:
  minutes on a CPU        python recipes/timeline.py --model runs/latest/sft
  in real containers      python recipes/timeline.py --model runs/latest/sft --sandbox docker
  draw it again           mini-rome figure timeline
  of a single run         python recipes/ipa.py --timeline true; mini-rome figure runs/latest/timeline.csv
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads slow every neighbour

from dataclasses import dataclass, field, replace  # noqa: E402

from rich.console import Console  # noqa: E402

from mini_rome.arguments import RunArguments  # noqa: E402
from mini_rome.config import IPAConfig  # noqa: E402
from mini_rome.evaluation.figures import redraw  # noqa: E402
from mini_rome.evaluation.rows import read_summary  # noqa: E402
from mini_rome.evaluation.timeline_figure import read_spans, shares_table  # noqa: E402
from mini_rome.options import OptionsParser, guarded  # noqa: E402
from mini_rome.pipeline import Run  # noqa: E402
from mini_rome.runs import claim_output  # noqa: E402
from mini_rome.timeline import TIMELINE_CSV, write  # noqa: E402

WAYS = ((0, False), (1, False), (1, True))  # async_ratio and multiplex of sync, ahead, multiplexed


@dataclass
class TimelineArguments:
    """Where the numbers go."""

    out: str = field(default="recipes/results/timeline.csv", metadata={"help": "CSV; JSON and PNG lie beside it."})


def main() -> None:
    kinds = (RunArguments, IPAConfig, TimelineArguments)
    parser = OptionsParser(__doc__, kinds, own=(RunArguments, TimelineArguments))
    parser.set_defaults(max_steps=3, eval_every=0, keep_episodes=0, timeline=True, save_strategy="no")
    arguments, args, options = parser.parse()
    out = claim_output(options.out)
    spans, facts = {}, {}
    for ratio, multiplex in WAYS:
        changed = replace(args, async_ratio=ratio, multiplex=multiplex, generation_batch_size=None)
        with Run(arguments, changed) as run:
            run.build_model()
            if run.needs_sft:
                run.sft()
                run.save_model("sft")
                arguments = replace(arguments, model=str(run.folder / "sft"))
            run.train_ipa("ipa", run.experts(), None)
        facts = read_summary((run.folder / TIMELINE_CSV).with_suffix(".json"))
        spans |= read_spans(run.folder / TIMELINE_CSV)
    write(out, spans, {name: value for name, value in facts.items() if name != "ways"})
    Console(width=120).print(shares_table(read_summary(out.with_suffix(".json"))["ways"]))
    print(redraw(out, out.with_suffix(".json"), out.with_suffix(".png")))


if __name__ == "__main__":
    guarded(main)
