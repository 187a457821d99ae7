"""Check that an export computes in torch what the model does in JAX: `python -m torch_bridge.verify --run runs/digits`.

Runs the task's plain torch twin with the exported weights and the JAX model on real batches, and compares the outputs
of every layer, the loss and the gradients. With --module instead, compares a user's own torch module with its form in
JAX. Exit code 0 if all agree, 1 if anything differs.
"""

import argparse

from jaxtrain import commands


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "torch_bridge.verify",
        "Compare an exported run with its torch twin, or a torch module in JAX with torch itself, layer by layer.",
        "python -m torch_bridge.verify --run runs/digits\n"
        "  python -m torch_bridge.verify --module my_pkg:make_model --data my_pkg:make_data --steps 20",
    )
    commands.add_run(p, required=False)
    p.add_argument("--checkpoint", help="best, last or a step (default best, or last if none was evaluated)")
    p.add_argument("--weights", metavar="F", help="exported file to check (default: export the checkpoint now)")
    p.add_argument("--split", default="validation", help="validation, test or train (default validation)")
    p.add_argument("--batches", type=commands.count(), default=1, help="number of batches (default 1)")
    own = p.add_argument_group("your own torch module, instead of --run; with --run, it gets that run's weights")
    own.add_argument("--module", metavar="PKG:FUNCTION", help="() -> a torch.nn.Module")
    own.add_argument("--data", metavar="PKG:FUNCTION", help="([split]) -> its training Dataset or DataLoader, as "
                     "data.target of a YAML")  # fmt: skip
    own.add_argument("--loss", metavar="PKG:NAME", help="a loss module's class, as torch.nn:MSELoss, or a function "
                     "(output, batch); without it the module's own")  # fmt: skip
    own.add_argument("--optimizer", metavar="PKG:FUNCTION", help="(module) -> a torch optimizer, or it and its "
                     "scheduler (default torch.optim.AdamW)")  # fmt: skip
    own.add_argument("--steps", type=commands.count(), default=20, help="updates on both sides (default 20)")
    own.add_argument("--batch-size", type=commands.count(2), default=8, help="samples per update (default 8)")
    own.add_argument("--output", type=commands.output_folder, metavar="DIR", help="write certificate.html and "
                     "certificate.json there")  # fmt: skip
    commands.add_quiet(p)
    commands.add_json(p)
    return commands.main(_run, p.parse_args(argv))


def _run(arguments: argparse.Namespace) -> int:
    from torch_bridge import verification  # imports torch and JAX, which --help does without

    return verification.run(arguments)


if __name__ == "__main__":
    commands.start(main)
