"""Parts of both generations in plain torch: stacks of layers, and an autoencoder's forward pass and methods."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.blocks import Widths
from jaxtrain.systems.fmri_autoencoder.config import ModelOptions
from jaxtrain.systems.fmri_autoencoder.errors import UnknownOption
from jaxtrain.systems.fmri_autoencoder.torch_losses import internal_losses

KINDS = ("video", "audio", "text")


def constructor_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a constructor's arguments from its `locals()`, without those that are not options of its model."""
    options = {name: value for name, value in arguments.items() if name not in ("self", "__class__", "more")}
    return options | arguments.get("more", {})


def checked(kind: type[ModelOptions], options: Mapping[str, Any], who: str) -> ModelOptions:
    """Return validated options. Raises UserError for an impossible value, and UnknownOption for an unknown name."""
    from jaxtrain import config_io

    try:
        return config_io.validate(kind, options, who)
    except UserError as error:
        raise UnknownOption(str(error)) if set(options) - set(kind.model_fields) else error from None


def keep(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Store a constructor's arguments, its `locals()`, as attributes of the module, under the same names."""
    for name, value in constructor_options(arguments).items():
        setattr(module, name, value)


def block(inputs: int, outputs: int, dropout: float) -> list[nn.Module]:
    """Return Linear, BatchNorm, ReLU, Dropout: four entries of a Sequential."""
    return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Dropout(dropout)]


def start_decoder(decoder: nn.Module) -> None:
    """Draw normal weights with std sqrt(2 / fan_out) and set biases to 0, as the original's decoder starts."""
    for module in decoder.modules():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(module.bias)


def dropout_rates(rate: float | None, *defaults: float) -> tuple[float, ...]:
    """Return the layers' own dropout rates, or `rate` for all of them if it is set."""
    return defaults if rate is None else (rate,) * len(defaults)


def encoder_dropout(options: ModelOptions):
    """Return a function from a layer's own dropout rate to the one it gets."""
    rate = options.encoder_dropout
    return (lambda default: default) if rate is None else (lambda default: rate)


def in_its_types(module: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state in the module's own dtypes, as copying it into the module's tensors would."""
    tensors = module.state_dict()
    return {key: value.to(tensors[key].dtype) if key in tensors else value for key, value in state.items()}


def read_checkpoint(path: Any, device: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint file of the original. Raises UserError for any other file, OSError for none."""
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise UserError(f"{path}: cannot be read as a torch checkpoint: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict) or "model_state_dict" not in content:
        names = ", ".join(map(str, list(content)[:6])) if isinstance(content, dict) else type(content).__name__
        raise UserError(f"{path}: has no model_state_dict; it holds {names}")
    return content


def parameter_counts(module: nn.Module) -> dict[str, int]:
    """Return the parameter count of every child by its name, and their `total`."""
    count = lambda part: sum(parameter.numel() for parameter in part.parameters())
    return {**{name: count(child) for name, child in module.named_children()}, "total": count(module)}


class Dense(nn.Module):
    """Layers fc1, bn1, fc2, bn2, ...: Linear, BatchNorm, ReLU, dropout. [batch, ...] -> [batch, features]."""

    def __init__(self, inputs, sizes, dropouts, relu_first=True):
        super().__init__()
        for number, size in enumerate(sizes, 1):
            setattr(self, f"fc{number}", nn.Linear(inputs, size))
            setattr(self, f"bn{number}", nn.BatchNorm1d(size))
            setattr(self, f"dropout{number}", nn.Dropout(dropouts[number - 1]))
            inputs = size
        self.layers, self.relu_first = len(sizes), relu_first

    def forward(self, x):
        x = (x if x.is_floating_point() else x.float()).flatten(1)
        for number in range(1, self.layers + 1):
            x = self.layer(number, x)
        return x

    def layer(self, number, x):
        x = getattr(self, f"bn{number}")(getattr(self, f"fc{number}")(x))
        drop = getattr(self, f"dropout{number}")
        return drop(x.relu()) if self.relu_first else drop(x).relu()


class TextEncoder(Dense):
    """Text encoder of both generations: embeddings of a volume [batch, input_dim] -> [batch, output_features]."""

    def __init__(self, input_dim=1024, output_features=256, *, widths=None, encoder_dropout=None):
        arguments, width = locals(), Widths(widths)
        super().__init__(
            width(input_dim), (width(512), width(output_features)), dropout_rates(encoder_dropout, 0.2, 0.2)
        )
        keep(self, arguments)


class Encoder(nn.Module):
    """Base class of both encoders."""

    def get_parameter_count(self) -> dict[str, int]:
        """Return parameter counts by layer, and their `total`."""
        return parameter_counts(self)


class Decoder(nn.Module):
    """Base class of both decoders: a trunk of layers, then two layers per modality.

    The trunk's layers are `layer<n>`; they are followed by `layer<n>_video`, ... and the last ones.
    """

    trunk_layers: tuple[int, ...]

    def trunk(self, x):
        for number in self.trunk_layers:
            x = getattr(self, f"layer{number}")(x)
        return x

    def branch(self, kind, x):
        number = self.trunk_layers[-1] + 1
        return getattr(self, f"layer{number}_{kind}")(x)

    def last(self, kind):
        return getattr(self, f"layer{self.trunk_layers[-1] + 2}_{kind}")

    def head(self, kind, x):
        return self.last(kind)(self.branch(kind, x))

    def forward(self, bottleneck):
        x = self.trunk(bottleneck)
        return tuple(self.head(kind, x) for kind in KINDS)

    def decode_video_only(self, bottleneck):
        return self.head("video", self.trunk(bottleneck))

    def decode_audio_only(self, bottleneck):
        return self.head("audio", self.trunk(bottleneck))

    def decode_text_only(self, bottleneck):
        return self.head("text", self.trunk(bottleneck))

    def get_layer_outputs(self, bottleneck) -> dict[str, torch.Tensor]:
        """Return every layer's output by name; `audio` is the last layer's, before any later processing."""
        outputs, x = {}, bottleneck
        for number in self.trunk_layers:
            outputs[f"layer{number}"] = x = getattr(self, f"layer{number}")(x)
        branches = {kind: self.branch(kind, x) for kind in KINDS}
        outputs |= {f"layer{self.trunk_layers[-1] + 1}_{kind}": y for kind, y in branches.items()}
        return outputs | {kind: self.last(kind)(y) for kind, y in branches.items()}

    def count_parameters(self) -> dict[str, int]:
        """Return parameter counts by layer, and their `total`."""
        return parameter_counts(self)


class Autoencoder(nn.Module):
    """Base class of both generations. options: their Gen1Options or HeadOptions, whose fields are attributes too."""

    SAVED = (
        *("video_height", "video_width", "audio_mels", "text_dim", "n_voxels", "bottleneck_dim"),
        *("reconstruction_weight", "fmri_weight"),
    )
    OPTIONS: type[ModelOptions]

    def __init__(self, options: ModelOptions):
        super().__init__()
        self.options = options
        for name, value in options:
            setattr(self, name, value)

    @classmethod
    def of(cls, options: ModelOptions):
        """Build the model from its options."""
        return cls(**dict(options))

    def forward(self, video, audio, text, fmri_target=None) -> dict[str, torch.Tensor]:
        """Return `bottleneck`, `predicted_fmri`, `video_recon`, `audio_recon`, `text_recon`, and losses when training.

        The losses are the batch's plain mean squared errors (`fmri_loss` only with a target) and the weighted
        `total_loss`.
        """
        bottleneck, voxels = self.encoder(video, audio, text, return_voxels=True)
        outputs = {"bottleneck": bottleneck, "predicted_fmri": voxels}
        outputs |= dict(zip((f"{kind}_recon" for kind in KINDS), self.decoder(bottleneck), strict=True))
        if self.training:
            weights = self.reconstruction_weight, self.fmri_weight
            outputs |= internal_losses(outputs, (video, audio, text), fmri_target, *weights)
        return outputs

    def encode_only(self, video, audio, text, return_voxels: bool = False):
        """Return (bottleneck, voxels or None)."""
        return self.encoder(video, audio, text, return_voxels=return_voxels)

    def decode_only(self, bottleneck):
        """Return (video, audio, text)."""
        return self.decoder(bottleneck)

    def get_parameter_count(self) -> dict[str, Any]:
        """Return parameter counts by part and layer, and their `total`."""
        parts = {"encoder": self.encoder.get_parameter_count(), "decoder": self.decoder.count_parameters()}
        return {**parts, "total": sum(part["total"] for part in parts.values())}

    def count_parameters(self) -> dict[str, int]:
        return parameter_counts(self)

    def save_checkpoint(self, path, epoch, optimizer_state=None, loss=None, metadata=None) -> None:
        """Write the original's checkpoint: `model_state_dict`, `architecture`, `epoch`, and any other given values."""
        content = {"epoch": epoch, "model_state_dict": self.state_dict()}
        content["architecture"] = {name: getattr(self.options, name) for name in self.SAVED}
        extra = {"optimizer_state_dict": optimizer_state, "loss": loss, "metadata": metadata}
        torch.save(content | {name: value for name, value in extra.items() if value is not None}, path)

    @classmethod
    def load_checkpoint(cls, path, device=None, **options: Any) -> tuple["Autoencoder", dict[str, Any]]:
        """Return (model, checkpoint) from a file of `save_checkpoint` or of the original's Trainer.

        options: those that `architecture` does not hold (features, dropout, widths, and for a Trainer's file the
        sizes). Raises UserError for a file without weights.
        """
        content = read_checkpoint(path, device or "cpu")
        sizes = cls.sizes_of_old_files | {**content.get("architecture", {}), **options}
        with torch.device("meta"):  # filled below, so that the weights are allocated once
            model = cls.of(checked(cls.OPTIONS, sizes, "load_checkpoint"))
        model.load_state_dict(in_its_types(model, content["model_state_dict"]), assign=True)
        return model.eval(), content

    sizes_of_old_files: Mapping[str, Any] = {}
