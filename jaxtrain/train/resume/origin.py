"""Find the checkpoint that a run resumes from: in its own folder, that folder's mirror, or another run."""

import pathlib

from jaxtrain.errors import UserError
from jaxtrain.runtime.launch import broadcast_from_process_zero
from jaxtrain.train import run_dir
from jaxtrain.train.checkpoint.checkpoints import Checkpoints
from jaxtrain.train.checkpoint.mirror import Unreachable
from jaxtrain.train.program import Program
from jaxtrain.train.resume import folder_choice
from jaxtrain.train.resume.fingerprint import Fingerprint


def choose_folder(program: Program, now: Fingerprint, resume: str, forced: bool) -> list[str]:
    """Set the program's run folder to the one that this run has or gets; return warnings about that.

    now: this run's fingerprint, before anything is restored. forced: use the config's folder, whatever it holds.
    """
    folder, total = program.config.run.folder, program.total_steps

    def choose() -> list:
        chosen = folder_choice.choose(folder, program.config, now, total, resume, forced)
        return [str(chosen.folder), chosen.warnings]

    chosen, warnings = broadcast_from_process_zero("folder", choose)
    if pathlib.Path(chosen) != folder:
        run = program.config.run.model_copy(update={"dir": chosen})
        program.config = program.config.model_copy(update={"run": run})
    return warnings


def find(program: Program, now: Fingerprint, own: Checkpoints, resume: str) -> tuple[Checkpoints, int | None]:
    """Return the checkpoints that the run resumes from, and the step of the newest intact one, or None.

    own: those of its folder. resume: "auto", "never", "here" (its folder, whatever it holds), or another run's folder.
    Raises UserError if the other run has none, or if "never" would start over existing ones.
    """
    copied = broadcast_from_process_zero("mirror", lambda: _mirrored(program, now, own, resume))
    if resume not in ("auto", "never", "here"):
        other = run_dir.checkpoints(pathlib.Path(resume).expanduser(), program.config, own.warn)
        step = broadcast_from_process_zero("resume", lambda: other.newest_good(set_aside=False))
        if step is None:
            raise UserError(f"--resume {resume}: no checkpoint under {other.folder}")
        return other, step
    found = broadcast_from_process_zero("latest", own.latest)
    if resume == "never" and (found is not None or copied):
        place, found = (program.config.run.folder, found) if found is not None else (own.mirror.place, copied[-1])
        raise UserError(
            f"{place}: holds checkpoints up to step {found} and --resume never would start over them; choose "
            "another run.dir, or move the folder away"
        )
    return own, broadcast_from_process_zero("resume", lambda: own.newest_good(copied=copied))


def _mirrored(program: Program, now: Fingerprint, own: Checkpoints, resume: str) -> list[int]:
    """Return the steps in the mirror that the run may resume from; none if the user named a folder that has its own."""
    mirror = own.mirror
    if mirror is None:
        return []
    try:
        folder_choice.check_mirror(mirror, program.config.run.folder, program.config, now, program.total_steps)
        return [] if resume == "here" and own.steps() else mirror.steps()
    except Unreachable as error:
        if not own.steps():
            raise
        own.warn(str(error))
        return []
