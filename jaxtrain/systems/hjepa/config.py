"""Settings of the two tasks beyond the core's: `model`, `masking`, `loss`, `probe`, more `data` keys."""

from typing import Literal

from pydantic import Field

from jaxtrain.config import MOST_LAYERS, DataConfig, Section

DATASETS = ("digits", "folder", "imagenet", "imagenet100", "cifar10", "cifar100", "stl10")


class ViTConfig(Section):
    """Overrides of the preset that `model.encoder_type` names; what is left out stays the preset's."""

    patch_size: int | None = Field(default=None, ge=1)  # pixels per side
    embed_dim: int | None = Field(default=None, ge=1)  # width of a token
    depth: int | None = Field(default=None, ge=1, le=MOST_LAYERS)  # blocks
    num_heads: int | None = Field(default=None, ge=1)
    mlp_ratio: float | None = Field(default=None, gt=0)  # hidden width / embed_dim
    in_chans: int | None = Field(default=None, ge=1)  # image channels


class PredictorConfig(Section):
    depth: int = Field(default=6, ge=1, le=MOST_LAYERS)
    num_heads: int = Field(default=12, ge=1)
    mlp_ratio: float = Field(default=4.0, gt=0)


class EmaConfig(Section):
    momentum: float = Field(default=0.996, ge=0, le=1)  # of the target encoder, at the first step
    momentum_end: float = Field(default=1.0, ge=0, le=1)
    warmup_steps: int = Field(default=0, ge=0)  # optimizer steps at `momentum` before the straight line to momentum_end
    ramp_steps: int | None = Field(default=None, ge=1)  # optimizer step at momentum_end; train.steps if left out
    ramp_ratio: float | None = Field(default=None, gt=0)  # the same as a fraction of all steps; may pass 1


class FpnConfig(Section):
    use_fpn: bool = False
    feature_dim: int | None = Field(default=None, ge=1)  # width inside the pyramid; embed_dim if left out
    fusion_method: Literal["add", "concat"] = "add"


class LayerScaleConfig(Section):
    use_layerscale: bool = False
    init_value: float = Field(default=1e-5, gt=0)


class RopeConfig(Section):
    use_rope: bool = False  # rotary positions in both encoders, in addition to the learned ones
    theta: float = Field(default=10000.0, gt=0)


class ModelConfig(Section):
    encoder_type: str = "vit_base_patch16_224"  # a timm name; sizes by `vit`
    vit: ViTConfig = ViTConfig()
    embed_dim: int | None = Field(default=None, ge=1)  # the encoder's width; only checked
    encoder_weights: str | None = None  # a file of timm's VisionTransformer weights to start both encoders from
    num_hierarchies: int = Field(default=3, ge=1, le=4)  # levels of comparison
    predictor: PredictorConfig = PredictorConfig()
    ema: EmaConfig = EmaConfig()
    fpn: FpnConfig = FpnConfig()
    layerscale: LayerScaleConfig = LayerScaleConfig()
    rope: RopeConfig = RopeConfig()
    projection_norm: Literal["layernorm", "batchnorm", "none"] = "layernorm"
    use_target_encoder: bool = True  # False: the live encoder gives the targets; needs a regulariser
    drop_path_rate: float = Field(default=0.0, ge=0, lt=1)  # of the last block
    gradient_checkpointing: bool = False  # recompute blocks of encoder and predictor in the backward pass
    drop_masked: bool = False  # masked patches leave the context encoder: less work, another forward pass


class MaskingConfig(Section):
    kind: Literal["fixed", "ragged"] = "fixed"  # fixed: every mask has the same count; ragged: as the blocks fall
    generator: Literal["hierarchical", "multi_block"] = "hierarchical"  # the original's level 0, or I-JEPA's blocks
    num_masks: int = Field(default=4, ge=1, le=MOST_LAYERS)  # target blocks per image
    mask_scale: tuple[float, float] = (0.05, 0.15)  # area of a block / area of the image, from and to
    aspect_ratio: tuple[float, float] = (0.75, 1.5)  # width / height of a block, from and to
    ratio: float | None = Field(default=None, gt=0, lt=1)  # fixed: masked share; num_masks * mean(mask_scale) if null
    where: Literal["device", "loader"] = "device"  # loader: with numpy, in the original's draw order


class LossConfig(Section):
    """The original's flat names. type: what is minimised; jepa_loss_type: the distance of prediction and target."""

    type: Literal[
        "hjepa", "jepa", "smoothl1", "mse", "huber", "combined", "hierarchical_combined", "vicreg", "sigreg",
        "hjepa_sigreg", "sigreg_combined", "cjepa", "contrastive_jepa",
    ] = "combined"  # fmt: skip
    jepa_loss_type: Literal["mse", "smoothl1", "huber"] | None = None  # type's own name or smoothl1 if left out
    hierarchy_weights: float | list[float] = 1.0  # per level
    num_hierarchies: int | None = None  # accepted for the original's files; model.num_hierarchies decides
    normalize_embeddings: bool = True  # compare directions only
    detach_targets: bool = True  # no gradient through the targets
    reduction: Literal["mean", "sum", "none"] = "mean"  # training takes mean
    huber_delta: float = Field(default=1.0, gt=0)
    use_contrastive: bool = False  # add NT-Xent, as type cjepa
    contrastive_weight: float = Field(default=0.1, ge=0)
    contrastive_temperature: float = Field(default=0.1, gt=0)
    vicreg_weight: float | list[float] = 0.1  # of the whole VICReg term
    vicreg_invariance_weight: float = Field(default=25.0, ge=0)
    vicreg_variance_weight: float = Field(default=25.0, ge=0)
    vicreg_covariance_weight: float = Field(default=1.0, ge=0)
    sigreg_loss_weight: float = Field(default=1.0, ge=0)  # of SIGReg in hjepa_sigreg
    sigreg_weight: float = Field(default=25.0, ge=0)  # of its statistic in type sigreg
    sigreg_invariance_weight: float = Field(default=25.0, ge=0)  # of its invariance in type sigreg
    sigreg_num_slices: int = Field(default=1024, ge=1)  # random directions
    sigreg_num_test_points: int = Field(default=17, ge=2)
    sigreg_test_method: Literal["reference_points", "char_function"] = "reference_points"
    sigreg_fixed_slices: bool = False  # the same directions at every step
    sigreg_char_function_num_quadrature: int = Field(default=32, ge=2)  # of the quadrature of char_function
    sigreg_char_function_t_min: float = Field(default=0.2, ge=0)  # range in which char_function compares, from
    sigreg_char_function_t_max: float = Field(default=4.0, gt=0)  # and to
    sigreg_char_function_lambda: float = Field(default=1.0, gt=0)  # width of the weight exp(-t^2 / (2 lambda^2))


class AugmentationConfig(Section):
    color_jitter: float = Field(default=0.4, ge=0)  # strength; 0: none
    crop_scale: tuple[float, float] = (0.8, 1.0)  # area of the random crop / area of the image, from and to
    horizontal_flip: float = Field(default=0.5, ge=0, le=1)  # probability
    global_crops: int = Field(default=1, ge=1, le=MOST_LAYERS)  # crops of image_size, masked and predicted separately
    local_crops: int = Field(default=0, ge=0, le=MOST_LAYERS)  # additional smaller crops per image (multi-crop)
    local_size: int | None = Field(default=None, ge=1)  # pixels per side of a local crop; image_size / 2 if null
    local_scale: tuple[float, float] = (0.05, 0.4)  # area of a local crop / area of the image, from and to
    where: Literal["device", "loader"] = "device"  # device: inside the step, on images resized once


class DatasetConfig(Section):
    name: str
    weight: float = Field(default=1.0, ge=0)
    path: str | None = None


class HJepaData(DataConfig):
    dataset: Literal["digits", "imagenet", "imagenet100", "cifar10", "cifar100", "stl10", "folder"] = "digits"
    path: str = "data"  # folder of the dataset's own layout
    image_size: int = Field(default=224, ge=1)  # pixels per side, what the encoder sees
    class_list: str | None = None  # imagenet100: a file with the name of one class folder per line
    validation_ratio: float = Field(default=0.2, gt=0, lt=1)  # digits: share held out
    datasets: list[DatasetConfig] = []  # several sources at once instead of `dataset`
    sampling_strategy: Literal["weighted", "balanced", "concat"] = "concat"
    temperature: float = Field(default=1.0, gt=0)  # weighted: weights are raised to 1 / temperature
    augmentation: AugmentationConfig = AugmentationConfig()


class ProbeConfig(Section):
    """Choose how evaluation scores features besides the loss. Labels only train the probes, never the model."""

    samples: int = Field(default=50_000, ge=2)  # of a split that `jaxtrain.evaluate` judges, spread evenly over it
    knn_k: int = Field(default=20, ge=1)
    knn_temperature: float = Field(default=0.07, gt=0)
    epochs: int = Field(default=100, ge=1)  # passes of the linear probe in `jaxtrain.evaluate`
    lr: float = Field(default=0.1, gt=0)  # of the linear probe
    batch_size: int = Field(default=256, ge=1)  # of the linear probe
    few_shot_shots: list[int] = [1, 5, 10]
    few_shot_episodes: int = Field(default=100, ge=1)
    folds: int = Field(default=0, ge=0)  # of the linear probe over training and evaluated samples together; 0: none
    fine_tune_epochs: int = Field(default=0, ge=0)  # passes that train a copy of the encoder with a classifier; 0: none
    fine_tune_lr: float = Field(default=1e-3, gt=0)  # of the classifier; encoder: times fine_tune_encoder_lr_ratio
    fine_tune_encoder_lr_ratio: float = Field(default=0.1, ge=0)  # 0: the encoder stays frozen
    fine_tune_weight_decay: float = Field(default=0.05, ge=0)
    collapse_rank_ratio: float = Field(default=0.05, ge=0, le=1)  # warn below this effective rank / width
    collapse_std: float = Field(default=0.01, ge=0)  # warn below this standard deviation of features over images


class WorldModelConfig(Section):
    """LeWM: a frame encoder and an action-conditioned predictor in its space."""

    encoder_type: str = "vit_tiny_patch16_224"
    vit: ViTConfig = ViTConfig()
    embed_dim: int | None = Field(default=None, ge=1)
    action_dim: int = Field(default=4, ge=1)  # numbers per action
    predictor_depth: int = Field(default=6, ge=1, le=MOST_LAYERS)
    predictor_num_heads: int = Field(default=16, ge=1)
    predictor_mlp_ratio: float = Field(default=4.0, gt=0)
    predictor_dropout: float = Field(default=0.1, ge=0, lt=1)
    predictor_max_seq_len: int = Field(default=256, ge=1)  # steps
    projection_norm: Literal["layernorm", "batchnorm", "none"] = "batchnorm"
    layerscale: LayerScaleConfig = LayerScaleConfig()  # of the frame encoder
    gradient_checkpointing: bool = False


class WorldModelLoss(Section):
    sigreg_weight: float = Field(default=0.1, ge=0)
    sigreg_num_slices: int = Field(default=1024, ge=1)
    sigreg_num_quadrature: int = Field(default=32, ge=2)


class SequenceData(DataConfig):
    path: str | None = None  # folder of .pt files with frames [L, C, H, W] and actions [L, A]; synthetic if left out
    image_size: int = Field(default=224, ge=1)
    seq_len: int = Field(default=16, ge=2)  # steps per item
    random_window: bool = True  # one window per file, its start drawn anew; False: every window in order
    synthetic_items: int = Field(default=64, ge=1)
