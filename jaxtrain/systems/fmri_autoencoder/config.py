"""Settings of the film-to-brain autoencoders."""

from typing import Literal

from pydantic import Field, model_validator

from jaxtrain.config import DataConfig, Section


class ModelOptions(Section):
    """Hold the settings that both generations share."""

    video_height: int = Field(default=90, ge=1)  # pixels of a frame
    video_width: int = Field(default=160, ge=1)
    audio_mels: int = Field(default=128, ge=1)  # mel bands of a spectrogram
    text_dim: int = Field(default=1024, ge=1)  # width of the text embedding of one volume
    n_voxels: int = Field(default=85810, ge=1)
    video_features: int = Field(default=1024, ge=1)  # width of each encoder's output
    audio_features: int = Field(default=256, ge=1)
    text_features: int = Field(default=256, ge=1)
    encoder_dropout: float | None = Field(default=None, ge=0, lt=1)  # of every encoder layer; null keeps 0.2 and 0.3
    decoder_dropout: float = Field(default=0.3, ge=0, lt=1)
    reconstruction_weight: float = 1.0  # of the losses that the model itself returns in training mode
    fmri_weight: float = 1.0
    widths: dict[int, int] = {}  # hard-coded width -> the one to use instead: {16384: 4096}
    batch_norm_groups: int = Field(
        1, ge=1
    )  # 1: statistics of the whole batch; n: of n parts, as n devices unsynchronised


class Gen1Options(ModelOptions):
    """The first generation: convolutions over one averaged frame, 128 mel bands, one sentence embedding."""

    bottleneck_dim: int = Field(default=8000, ge=1)
    decoder_hidden_dim: int = Field(default=2048, ge=2)
    channel_widths: dict[int, int] = {}  # convolution channels -> the ones to use instead: {32: 8}


class HeadOptions(ModelOptions):
    """The second generation: dense encoders over a window of frames, EnCodec codes or a mel spectrogram."""

    audio_mels: int = Field(default=2048, ge=1)
    bottleneck_dim: int = Field(default=2048, ge=1)
    use_encodec: bool = False
    audio_frames_per_tr: int = Field(default=65, ge=1)
    video_frames_per_tr: int = Field(default=19, ge=1)
    gradient_checkpointing: bool = False  # recompute the video encoder in the backward pass

    @property
    def audio_columns(self) -> int:
        """Width of the audio input of one volume."""
        return (8 if self.use_encodec else self.audio_mels) * self.audio_frames_per_tr

    @property
    def video_columns(self) -> int:
        """Width of the video input of one volume: a window of frames."""
        return self.video_frames_per_tr * self.video_height * self.video_width * 3


class LossOptions(Section):
    """Weights and kinds of the criterion."""

    reconstruction_weight: float = 1.0
    fmri_weight: float = 1.0
    video_weight: float = 1.0
    audio_weight: float = 1.0
    text_weight: float = 1.0
    fmri_loss_type: Literal["mse", "mae", "correlation"] = "mse"
    normalize_by_std: bool | None = None  # divide each error by its target's spread; null: head yes, gen1 no


class LesionOptions(Section):
    """Choose what `jaxtrain.evaluate --run DIR lesion.at=voxels lesion.region=F.nii.gz` silences before decoding."""

    at: Literal["bottleneck", "voxels"] | None = None  # null: none
    places: list[int] = []  # units of the bottleneck, or voxels in the order of the mask
    region: str | None = None  # voxels: a NIfTI image on the recording's grid, all that is not 0
    factor: float = 0.0  # what the chosen places are multiplied by
    ridge: float = Field(default=1.0, gt=0)  # voxels: how strongly the bottleneck is held near the intact one
    samples: int = Field(default=16, ge=1)  # volumes of the split that are decoded

    @model_validator(mode="after")
    def _something_is_chosen(self):
        if self.at is not None and not self.places and self.region is None:
            raise ValueError("a lesion needs places, or for voxels a region")
        if self.at == "bottleneck" and self.region is not None:
            raise ValueError("region chooses voxels; set at: voxels")
        return self


class Data(DataConfig):
    """Where the recording is and how it becomes samples; `prepare` and training read the same keys."""

    data_dir: str = "data/sherlock"  # film, annotations, NIfTI volumes
    cache_dir: str | None = None  # prepared arrays; <data_dir>/cache if left out
    # A planted recording: arrays in memory, the same mapped from files in the cache (for sizes beyond memory), or raw
    # files in data_dir that the whole pipeline prepares.
    synthetic: Literal["none", "arrays", "mapped", "raw"] = "none"
    synthetic_volumes: int = Field(default=240, ge=8)
    synthetic_subjects: int = Field(default=2, ge=1)
    subjects: Literal["all"] | list[int] = "all"
    mode: Literal["per_subject", "cross_subject"] = "per_subject"  # cross_subject: the average over subjects
    tr: float = Field(default=1.5, gt=0)  # seconds per volume
    max_trs: int | None = Field(default=None, ge=1)  # use the first n volumes only
    video: Literal["window", "mean"] | None = None  # frames of a volume one by one, or averaged; null: head, gen1
    audio: Literal["encodec", "mel", "mel_mean"] | None = None  # null: encodec if the model needs it, else mel
    text: Literal["concatenate", "average"] | None = None  # null: head concatenates, gen1 averages
    frame_skip: int = Field(default=2, ge=1)  # keep every n-th frame of a window
    encodec_model: str = "facebook/encodec_24khz"  # on the Hugging Face hub, or a folder
    encodec_bandwidth: float = Field(default=3.0, gt=0)  # kilobits per second
    audio_sample_rate: int = Field(default=22050, ge=1)  # hertz, of the spectrogram
    text_encoder: str = "BAAI/bge-large-en-v1.5"  # sentence-transformers model, or `hashing` (no download, no meaning)
    max_annotations_per_tr: int = Field(default=3, ge=1)  # concatenate: embeddings side by side
    text_gap: Literal["forward_fill", "zero", "interpolate"] = "forward_fill"  # volumes without a scene
    apply_hrf: bool = True  # convolve film, sound and text with the haemodynamic response
    hrf: Literal["causal", "original"] | None = None  # null: causal, or original under compat: original
    normalize_fmri: Literal["train", "all", "none"] | None = (
        None  # volumes behind mean and std; null: train, original all
    )
    split_by: Literal["time", "subject"] = "time"
    train_ratio: float = Field(default=0.8, gt=0, lt=1)  # time: the first part of every subject's volumes trains
    gap_trs: int = Field(default=0, ge=0)  # time: volumes left out between the two parts
    validation_subjects: list[int] = []  # subject: these validate, the others train

    @model_validator(mode="after")
    def _subjects_validate(self):
        if self.split_by == "subject" and not self.validation_subjects:
            raise ValueError("split_by: subject needs validation_subjects, for example [16, 17]")
        return self
