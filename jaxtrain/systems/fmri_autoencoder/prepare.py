"""Raw files -> prepared arrays: `python -m jaxtrain.systems.fmri_autoencoder.prepare --data-dir data/sherlock`."""

import argparse
import json

from jaxtrain import commands

MODULE = "python -m jaxtrain.systems.fmri_autoencoder.prepare"
EXAMPLE = f"""{MODULE} --data-dir data/sherlock --config configs/sherlock_gen1.yaml
  {MODULE} --synthetic --data-dir runs/film --config configs/sherlock_tiny.yaml"""


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "systems.fmri_autoencoder.prepare",
        "Prepare film, annotations and volumes for training; finished stages are taken from the cache.",
        EXAMPLE,
    )
    p.add_argument(
        "--config", default="configs/sherlock_production.yaml", help="whose data and model sections to follow"
    )
    p.add_argument("--data-dir", help="the recording's folder (data.data_dir)")
    p.add_argument(
        "--synthetic", action="store_true", help="write a small planted recording there first, if it is empty"
    )
    p.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that win over the config's")
    commands.add_quiet(p)
    commands.add_json(p)
    return commands.main(run, p.parse_intermixed_args(argv))


def run(arguments: argparse.Namespace) -> None:
    from jaxtrain import config_io
    from jaxtrain.systems.fmri_autoencoder.data import prepare
    from jaxtrain.systems.fmri_autoencoder.pipeline import progress

    overrides = list(arguments.overrides)
    if arguments.data_dir:
        overrides.append(f"data.data_dir={arguments.data_dir}")
    if arguments.synthetic:
        overrides.append("data.synthetic=raw")
    _, config = config_io.load(arguments.config, overrides)
    recording = prepare(config, info=print, bar=progress)
    stimuli = {name: list(array.shape) for name, array in recording.stimuli.items()}
    held = sum(array.nbytes for array in recording.stimuli.values())
    shape = [len(recording.fmri), *recording.fmri[0].shape]
    summary = {"stimuli": stimuli, "stimuli_bytes": held, "fmri": shape, "subjects": recording.subject_ids}
    print(json.dumps(summary))
    arguments.found = summary


if __name__ == "__main__":
    commands.start(main)
