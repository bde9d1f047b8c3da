# /// script
# requires-python = ">=3.11"
# dependencies = ["mini-rome"]
# ///
"""Train a tiny Mixture-of-Experts agent in a sandbox: masked SFT, then IPA, then evaluation and a figure.

What differs from a textbook policy gradient (IPA, the paper's section 3.2.4):
  1. the unit is the interaction chunk: one response of the agent, up to the next answer of the environment;
  2. the reward is discounted per chunk, not per token, and shared by all tokens of a chunk (eq. 7);
  3. successful trajectories carry no importance ratio, failed ones one per chunk, clipped to [0, 1] (eq. 9);
  4. chunks that the trainer finds too much likelier than the sampler did are masked (eq. 8);
  5. episodes start from verified states in the middle of expert trajectories, moving back as the agent learns.

Commands:
  one CPU, minutes     python recipes/ipa.py        (or: accelerate launch recipes/ipa.py, or: make ipa)
  real containers      python recipes/ipa.py --sandbox docker
  an external agent    python recipes/ipa.py --agent native
  with the naive arm   python recipes/ipa.py --naive true
  two processes        accelerate launch --cpu --num_processes 2 recipes/ipa.py --max_steps 4
  LoRA                 python recipes/ipa.py --config recipes/configs/ipa_tiny_lora.yaml
  with vLLM            python recipes/ipa.py --sampler vllm
  will it fit 8 GPUs?  python recipes/ipa.py --config recipes/configs/ipa_30b_a3b_8gpu.yaml --dry-run
  after Ctrl-C         python recipes/ipa.py --resume runs/latest
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads slow every neighbour

from trl import ModelConfig  # noqa: E402

from mini_rome.arguments import RunArguments  # noqa: E402
from mini_rome.config import IPAConfig  # noqa: E402
from mini_rome.dryrun import NodeArguments, dry_run  # noqa: E402
from mini_rome.launch import start_processes  # noqa: E402
from mini_rome.options import OptionsParser, guarded, lora_config  # noqa: E402
from mini_rome.pipeline import Run  # noqa: E402


def main() -> None:
    start_processes()
    kinds = (RunArguments, IPAConfig, ModelConfig, NodeArguments)
    parser = OptionsParser(__doc__, kinds, own=(RunArguments, IPAConfig, NodeArguments))
    arguments, args, model_args, node = parser.parse()
    if node.dry_run:
        dry_run(args, node, arguments.train_tasks, lora_config(model_args))
        return
    with Run(arguments, args, context_length=node.context_length) as run:
        # Data: short tasks to imitate, long ones to learn by trial, others to test on. No instance is shared.
        short_test, long_test = run.tasks("test", arguments.sft_chunks), run.tasks("test", arguments.chunks)
        run.build_model()

        if run.needs_sft:
            run.evaluate("untrained", long_test)
            run.sft()
            run.evaluate("sft_short", short_test, arguments.sft_chunks)
            run.evaluate("sft", long_test)
            run.save_model("sft")

        experts = run.experts()
        run.train_ipa("ipa", experts, lora_config(model_args))
        run.evaluate("ipa", long_test)
        run.save_model("model")

        if arguments.naive:
            run.load_model("sft")
            run.train_ipa("naive", experts, lora_config(model_args), resampling="none")
            run.evaluate("naive", long_test)
        run.report()


if __name__ == "__main__":
    guarded(main)
