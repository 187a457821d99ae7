"""From raw files to samples: what each stage gives, and when it is made anew."""

import numpy as np
import pandas
import pytest
import torch

from jaxtrain import config_io
from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder import hrf, pipeline, synthetic, text
from jaxtrain.systems.fmri_autoencoder.data import build_data, plan_of, prepare
from tests.unit.fmri_autoencoder import tiny

VOLUMES = 30


def config(folder, *overrides: str):
    given = [f"data.data_dir={folder}", f"data.synthetic_volumes={VOLUMES}", *overrides]
    return config_io.load(tiny.CONFIGS / "sherlock_tiny.yaml", given)[1]


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """A film, annotations and volumes, with everything prepared once."""
    folder = tmp_path_factory.mktemp("recording")
    prepare(config(folder))
    return folder


def made(folder, *overrides: str) -> set[str]:
    """Names of the stages that a preparation had to make."""
    lines: list[str] = []
    prepare(config(folder, *overrides), info=lines.append)
    return {line.split(":")[0] for line in lines if not line.endswith("(ready)")}


def test_the_film_arrives_as_it_was_planted(raw):
    video = prepare(config(raw, "data.apply_hrf=false")).stimuli["video"].reshape(VOLUMES, 3, 9, 16, 3)
    levels = synthetic.latents(plan_of(config(raw)))
    strips = video[:, 1, :, [1, 4, 6, 9, 11, 14], 0].mean(-1).T  # red, the middle of each feature's strip
    found = [np.corrcoef(strips[1:, i], levels[1:, i])[0, 1] for i in range(len(synthetic.FEATURES))]
    assert min(found) > 0.95


def test_what_is_prepared_is_not_prepared_again(raw):
    assert made(raw) == set()
    assert made(raw, "data.frame_skip=4") == {"video", "aligned"}
    assert made(raw, "data.text_gap=zero") == {"text", "aligned"}
    assert made(raw, "data.train_ratio=0.5") == {"scale"}


def test_a_changed_file_is_prepared_anew(raw, tmp_path):
    cache = f"data.cache_dir={tmp_path}"
    prepare(config(raw, cache))
    notes = raw / synthetic.ANNOTATIONS_NAME
    before, table = notes.read_bytes(), pandas.read_excel(notes)
    table.loc[0, text.TEXT_COLUMNS[0]] = "strong-fire"
    table.to_excel(notes, index=False)
    try:
        assert made(raw, cache) == {"text", "aligned"}
    finally:
        notes.write_bytes(before)


def test_an_interrupted_preparation_goes_on_where_it_stopped(raw, tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline.Pipeline, "_make_text", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(config(raw, f"data.cache_dir={tmp_path}"))
    assert made(raw, f"data.cache_dir={tmp_path}") == {"text", "spread", "mask", "bold", "scale", "aligned"}


def test_voxels_are_scaled_by_the_training_volumes(raw):
    source = build_data(config(raw), "train")
    values = np.stack([source[i]["fmri"] for i in range(24)])
    np.testing.assert_allclose(values.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(values.std(0), 1, atol=1e-3)
    everything = build_data(config(raw, "data.normalize_fmri=all"), "train")
    assert np.abs(np.stack([everything[i]["fmri"] for i in range(24)]).mean(0)).max() > 0.01


def test_stimuli_are_held_once_for_all_subjects(raw):
    source = build_data(config(raw), "train")
    stimuli = {id(array): array.nbytes for own in source.stimuli for array in own.values()}
    assert (len(source.fmri), len(source.stimuli), len(stimuli)) == (2, 2, 3)
    assert source.nbytes == sum(stimuli.values()) + sum(values.nbytes for values in source.fmri)
    assert isinstance(source.stimuli[0]["video"], np.memmap)


def test_subjects_split_or_averaged(raw):
    apart = ("data.split_by=subject", "data.validation_subjects=[2]")
    train, validation = (build_data(config(raw, *apart), split) for split in ("train", "validation"))
    assert (train.subject_ids, validation.subject_ids, len(train)) == ([1], [2], VOLUMES)
    both = build_data(config(raw), "validation")
    average = build_data(config(raw, "data.mode=cross_subject"), "validation")
    assert len(average) == VOLUMES - 24
    np.testing.assert_allclose(average[2]["fmri"], (both[2]["fmri"] + both[8]["fmri"]) / 2, atol=1e-4)
    with pytest.raises(UserError, match=r"data.validation_subjects: \[9\] leaves no subject to validation on"):
        build_data(config(raw, "data.split_by=subject", "data.validation_subjects=[9]"), "validation")


def test_a_model_of_other_sizes_is_told_what_to_change(raw):
    with pytest.raises(UserError, match=r"audio has 192 columns.*set model.n_voxels=206, it is 7"):
        build_data(config(raw, "model.n_voxels=7", "model.audio_frames_per_tr=5"), "train")


def test_missing_files_are_named_together(tmp_path):
    with pytest.raises(UserError, match=r"stimuli_Sherlock.m4v.*annotations.xlsx.*sherlock_movie_s1.nii.gz missing"):
        prepare(config(tmp_path, "data.synthetic=none"))


def test_the_original_options_give_its_response_and_scale(raw):
    settings = pipeline.Settings.of(config(raw, "compat=original"))
    assert (settings.hrf, settings.normalize) == ("original", "all")
    prepare(config(raw, "compat=original"))


def test_codes_come_from_an_encodec_folder(raw, tmp_path):
    from transformers import EncodecConfig, EncodecModel

    small = {"num_filters": 2, "hidden_size": 4, "codebook_dim": 4, "num_lstm_layers": 1, "num_residual_layers": 1}
    torch.manual_seed(0)
    codec = EncodecModel(EncodecConfig(**small))
    for layer in codec.quantizer.layers:
        layer.codebook.embed.normal_(std=0.01)  # a codebook that was not trained is 0
    codec.save_pretrained(tmp_path)
    given = ("data.audio=encodec", f"data.encodec_model={tmp_path}")
    codes = prepare(config(raw, *given)).stimuli["audio"]
    assert codes.shape == (VOLUMES, 8 * 112)
    assert codes.dtype == np.int16
    assert len(np.unique(codes[:, : 4 * 112])) > 4
    assert not codes[:, 4 * 112 :].any()  # 3 kbps are four codebooks; the original's table has eight


def test_sentences_are_embedded_by_a_local_model(raw, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "-", ";", *synthetic.FEATURES, *synthetic.LEVELS]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(tmp_path / "bert")
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    encoder = Transformer(str(tmp_path / "bert"))
    SentenceTransformer(modules=[encoder, Pooling(32)], device="cpu").save(str(tmp_path / "sentences"))
    given = f"data.text_encoder={tmp_path / 'sentences'}"
    found = prepare(config(raw, given, "data.apply_hrf=false")).stimuli["text"]
    np.testing.assert_allclose(np.linalg.norm(found[:, :32], axis=1), 1, rtol=1e-5)
    with pytest.raises(UserError, match="gives 32 values, the model wants 30"):
        prepare(config(raw, given, "model.text_dim=90"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("data.audio=encodec", "data.encodec_model=lab/none"), "data.encodec_model: lab/none .*data.audio=mel"),
        (("data.text_encoder=lab/none",), "data.text_encoder: lab/none .*data.text_encoder=hashing"),
    ],
)
def test_a_model_that_is_not_to_be_had_is_one_clear_error(given, message, raw):
    pytest.importorskip("sentence_transformers")
    with pytest.raises(UserError, match=message):
        prepare(config(raw, *given))


def test_the_response_is_nilearns_and_follows_its_cause():
    from nilearn.glm.first_level import glover_hrf

    kernel = glover_hrf(1.5, oversampling=1)
    np.testing.assert_allclose(hrf.canonical_hrf(1.5), kernel / np.abs(kernel).max(), atol=1e-12)
    impulse = np.eye(60)[:, 30:31]
    assert [int(hrf.respond(impulse, 1.5, kind).argmax()) for kind in ("causal", "original")] == [34, 24]
    np.testing.assert_allclose(hrf.respond(np.ones((60, 1)), 1.5)[-1], 1)  # a lasting stimulus keeps its value


def test_a_scene_without_text_moves_no_other_scenes_embedding(tmp_path):
    rows = {" Start Time (s) ": [0.0, 1.5, 3.0], "End Time (s)": [1.5, 3.0, 4.5]}
    pandas.DataFrame({**rows, "Location": ["a", None, "c"]}).to_excel(tmp_path / "a.xlsx", index=False)
    start, end, texts = text.annotations(tmp_path / "a.xlsx")
    assert (start.tolist(), end.tolist(), texts) == ([0.0, 3.0], [1.5, 4.5], ["a", "c"])
    pandas.DataFrame({"Location": ["a"]}).to_excel(tmp_path / "b.xlsx", index=False)
    with pytest.raises(UserError, match=r"column Start Time \(s\), End Time \(s\) is missing; it has Location"):
        text.annotations(tmp_path / "b.xlsx")


@pytest.mark.parametrize("generation", ["gen1", "head"])
def test_a_planted_recording_on_disk_is_the_one_in_memory(generation, tmp_path):
    kept = tiny.config(generation, "data.synthetic=mapped", f"data.data_dir={tmp_path}")
    memory, disk = (build_data(c, "validation") for c in (tiny.config(generation), kept))
    assert isinstance(disk.fmri[0], np.memmap)
    for index in (0, len(memory) - 1):
        for name, value in memory[index].items():
            np.testing.assert_array_equal(disk[index][name], value)
