"""Report of an evaluated model: every voxel's correlation as NIfTI and as slices, film against reconstruction."""

import json
import pathlib

import jax
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.evals.lesions import Lesion, effects, simulate
from jaxtrain.systems.fmri_autoencoder.extras import require
from jaxtrain.systems.fmri_autoencoder.metrics import voxel_correlation, voxel_sums
from jaxtrain.systems.fmri_autoencoder.volumes import to_volume
from torch_bridge.atomic_file import write_text

BATCH, FRAMES, SLICES = 16, 8, 6


def report(model, source, config, folder) -> list[pathlib.Path]:
    """Write the report into `folder` and return its files.

    voxel_correlation_s<subject>.nii.gz, voxel_correlation.nii.gz (mean over subjects) and glass_brain.png if the
    recording has a grid; voxel_correlation.png, frames.png, voxels.json (with baselines); with config.lesion also the
    files of `report_lesion`.
    The correlation is Pearson's over the split's volumes, per voxel and subject; predicting the mean scores 0.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    maps, strip = _evaluate(model, source, config)
    mean = np.mean(list(maps.values()), axis=0)
    grid, affine = getattr(source, "geometry", None) or (np.ones((len(mean), 1, 1), bool), np.eye(4))
    files = [_write_summary(folder / "voxels.json", maps, mean)]
    if _has_grid(grid):
        named = {f"voxel_correlation_s{subject}": values for subject, values in maps.items()}
        for name, values in {**named, "voxel_correlation": mean}.items():
            files.append(_write_map(folder / f"{name}.nii.gz", values, grid, affine))
        files.append(_draw_glass_brain(folder / "glass_brain.png", files[-1]))
    files.append(_draw_slices(folder / "voxel_correlation.png", to_volume(mean, grid, np.nan)))
    files.append(_draw_strip(folder / "frames.png", {"film": strip[0], "model": strip[1]}))
    return files + (report_lesion(model, source, config, folder) if config.lesion.at is not None else [])


def report_lesion(model, source, config, folder) -> list[pathlib.Path]:
    """Write the effects of config.lesion on the first volumes of a split; return the files.

    lesion.json (how far film, sound, text and voxels move), lesion_frames.png, and lesion_voxels.nii.gz (mean change of
    every predicted voxel) if the recording has a grid.
    """
    options = config.lesion
    grid, affine = source.geometry
    batch = _batch(source, range(min(options.samples, len(source))))
    lesion = Lesion(options.at, options.places or _places(options.region, grid), options.factor)
    effect = jax.device_get(simulate(model, batch, lesion, options.ridge))
    intact, changed = effect["intact"], effect["lesioned"]
    moved = {
        name: {"mean": float(rms.mean()), "max": float(rms.max())} for name, rms in effects(intact, changed).items()
    }
    path = folder / "lesion.json"
    settings = {"at": lesion.at, "places": len(lesion.places), "factor": lesion.factor, "volumes": len(batch["fmri"])}
    write_text(path, json.dumps({"lesion": settings, "root mean square change": moved}, indent=1))
    film, whole = _frames(batch["video"], intact["video"], config)
    rows = {"film": film, "intact": whole, "lesioned": _frames(batch["video"], changed["video"], config)[1]}
    files = [path, _draw_strip(folder / "lesion_frames.png", rows)]
    if _has_grid(grid):
        files.append(
            _write_map(folder / "lesion_voxels.nii.gz", (changed["fmri"] - intact["fmri"]).mean(0), grid, affine)
        )
    return files


def _places(region: str, grid: np.ndarray) -> list[int]:
    """Return the voxels, in the order of the mask `grid`, that a NIfTI image marks. Raises UserError for none."""
    marked = np.asarray(require("nibabel", "to read a region").load(region).dataobj)
    if marked.shape != grid.shape:
        raise UserError(f"lesion.region: {region} is {marked.shape}, the recording's grid is {grid.shape}; resample it")
    places = np.flatnonzero(marked[grid])
    if not places.size:
        raise UserError(f"lesion.region: {region} marks no voxel of the recording's mask")
    return places.tolist()


def _has_grid(grid: np.ndarray) -> bool:
    return grid.ndim == 3 and min(grid.shape) > 1


def _batch(source, indices) -> dict[str, np.ndarray]:
    items = [source[i] for i in indices]
    return {name: np.stack([item[name] for item in items]) for name in items[0]}


def _evaluate(model, source, config):
    """Return correlations [voxel] by subject, and the first frames of film and reconstruction.

    The frames are [n, height, width, 3] each.
    """
    run = jax.jit(lambda video, audio, text: model(video, audio, text))
    sums: dict[int, dict] = {}
    strip = None
    for start in range(0, len(source), BATCH):
        batch = _batch(source, range(start, min(start + BATCH, len(source))))
        outputs = run(batch["video"], batch["audio"], batch["text"])
        strip = _frames(batch["video"], outputs["video_recon"], config) if strip is None else strip
        subjects = batch.get("subject_id", np.zeros(len(batch["fmri"]), int))
        for subject in np.unique(subjects):
            batch_sums = jax.device_get(voxel_sums(outputs["predicted_fmri"], batch["fmri"], subjects == subject))
            known = sums.setdefault(int(subject), dict.fromkeys(batch_sums, 0.0))
            sums[int(subject)] = {
                name: known[name] + np.asarray(value, np.float64) for name, value in batch_sums.items()
            }
    return {subject: voxel_correlation(subject_sums) for subject, subject_sums in sums.items()}, strip


def _frames(video, recon, config):
    height, width = config.model.video_height, config.model.video_width
    recon = np.asarray(recon)[:FRAMES]
    video = np.asarray(video)[:FRAMES]
    if video.ndim == 4:  # the first generation's input and output are channels first
        picture = lambda x: x.reshape(-1, 3, height, width).transpose(0, 2, 3, 1)
    else:
        picture = lambda x: x[:, : height * width * 3].reshape(-1, height, width, 3)
    return np.clip(picture(video), 0, 1), np.clip(picture(recon), 0, 1)


def _write_summary(path, maps, mean) -> pathlib.Path:
    describe = lambda values: {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p90": float(np.percentile(values, 90)),
        "above_0.2": float((values > 0.2).mean()),
    }
    summary = {f"subject {subject}": describe(values) for subject, values in maps.items()}
    summary |= {"mean over subjects": describe(mean), "mean predictor": {"mean": 0.0}}
    write_text(path, json.dumps(summary, indent=1))
    return path


def _write_map(path, values, mask, affine) -> pathlib.Path:
    nibabel = require("nibabel", "to write voxel maps")
    nibabel.save(nibabel.Nifti1Image(to_volume(values, mask), affine), path)
    return path


def _figure(rows: int, columns: int):
    require("matplotlib", "to draw reports")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.8 * columns, 1.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _draw_slices(path, volume) -> pathlib.Path:
    depth = volume.shape[2]
    chosen = np.unique(np.linspace(0, depth - 1, min(SLICES, depth)).round().astype(int))
    figure, axes = _figure(1, len(chosen))
    for axis, index in zip(axes[0], chosen, strict=True):
        picture = axis.imshow(volume[:, :, index].T, origin="lower", cmap="coolwarm", vmin=-1, vmax=1)
        axis.set_title(f"z = {index}", fontsize=8)
        axis.set_axis_off()
    figure.colorbar(picture, ax=list(axes[0]), label="correlation over time")
    figure.savefig(path, dpi=110)
    return path


def _draw_glass_brain(path, image) -> pathlib.Path:
    """Draw projections of a map through an outline of the brain; the map is assumed to be in MNI space."""
    require("matplotlib", "to draw reports").use("Agg")
    require("nilearn.plotting", "to draw glass brains").plot_glass_brain(
        str(image),
        display_mode="lyrz",
        cmap="coolwarm",
        vmin=-1,
        vmax=1,
        plot_abs=False,
        threshold=0,
        colorbar=True,
        output_file=path,
    )
    return path


def _draw_strip(path, strips: dict) -> pathlib.Path:
    """Draw one row of pictures per entry. strips: pictures [n, height, width, 3] by the name of their row."""
    figure, axes = _figure(len(strips), len(next(iter(strips.values()))))
    for row, (name, pictures) in enumerate(strips.items()):
        for axis, picture in zip(axes[row], pictures, strict=True):
            axis.imshow(picture)
            axis.set_xticks([])
            axis.set_yticks([])
        axes[row][0].set_ylabel(name)
    figure.savefig(path, dpi=110)
    return path
