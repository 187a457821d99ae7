"""Models of transformers, timm, diffusers and torchvision, small, with random weights."""

import torch
from torch.nn import functional as F

from benchmarks.public_trainings import Training, one, training

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 40}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def ids(rows: int = 3, length: int = 8) -> dict[str, torch.Tensor]:
    mask = (torch.arange(length) < torch.tensor([length, length - 2, length - 4])[:rows, None]).long()
    return {"input_ids": torch.randint(1, 40, (rows, length)), "attention_mask": mask}


def own_loss(module, batches) -> Training:
    """Train a model that gives its loss."""
    return one(module, lambda m, batch: m(**batch).loss, batches)


@training("BERT", "transformers, masked words, -100 labels")
def bert() -> Training:
    import transformers

    model = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **NO_DROPOUT, max_position_embeddings=16))

    def batch():
        rows = ids()
        labels = torch.where(torch.rand(3, 8) < 0.4, rows["input_ids"], -100)
        labels[:, 0] = rows["input_ids"][:, 0]
        return rows | {"labels": labels}

    return own_loss(model, [batch() for _ in range(2)])


@training("Llama", "transformers, grouped heads, rotary positions, padding masked")
def llama() -> Training:
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=1))
    rows = [ids() for _ in range(2)]
    return own_loss(model, [b | {"labels": b["input_ids"].masked_fill(b["attention_mask"] == 0, -100)} for b in rows])


@training("T5", "transformers, encoder and decoder, relative positions")
def t5() -> Training:
    import transformers

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 40}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    )
    return own_loss(model, [ids() | {"labels": torch.randint(1, 40, (3, 5))} for _ in range(2)])


@training("ViT", "transformers, image classification")
def vit() -> Training:
    import transformers

    sizes = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    config = transformers.ViTConfig(**sizes, **NO_DROPOUT, image_size=16, patch_size=4, num_labels=3)
    make = lambda: {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 3, (4,))}
    return own_loss(transformers.ViTForImageClassification(config), [make() for _ in range(2)])


@training("Wav2Vec2", "transformers, convolutions over sound, CTC inside the model")
def wav2vec2() -> Training:
    import transformers

    off = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0}
    off |= {"activation_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0, "apply_spec_augment": False}
    config = transformers.Wav2Vec2Config(
        **(SMALL | {"vocab_size": 8}),
        **off,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        ctc_loss_reduction="mean",
    )
    make = lambda: {"input_values": torch.randn(2, 160), "labels": torch.randint(1, 8, (2, 3))}
    return own_loss(transformers.Wav2Vec2ForCTC(config), [make() for _ in range(2)])


@training("mixture of transformers", "transformers' Mixtral: experts by top k, balancing loss in the model")
def mixtral() -> Training:
    import transformers

    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    )
    rows = [ids() for _ in range(2)]
    return own_loss(transformers.MixtralForCausalLM(config), [b | {"labels": b["input_ids"]} for b in rows])


@training("timm ViT", "timm, registers, layer scale, soft labels")
def timm_vit() -> Training:
    import timm
    from timm.loss import SoftTargetCrossEntropy

    model = timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=3, reg_tokens=2, init_values=1e-2
    )
    criterion = SoftTargetCrossEntropy()
    make = lambda: (torch.randn(4, 3, 16, 16), torch.randn(4, 3).softmax(1))
    return one(model, lambda m, b: criterion(m(b[0]), b[1]), [make() for _ in range(2)])


@training("timm ConvNeXt", "timm, depthwise convolutions, timm's own optimizer factory")
def convnext() -> Training:
    import timm
    from timm.optim import create_optimizer_v2

    model = timm.models.ConvNeXt(num_classes=3, depths=(1, 1, 1, 1), dims=(4, 8, 8, 16), patch_size=2)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    make = lambda: (torch.randn(4, 3, 32, 32), torch.randint(0, 3, (4,)))
    return one(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), [make() for _ in range(2)], optimizer)


@training("timm EfficientNet", "timm, squeeze and excitation, batch norm, RMSprop")
def efficientnet() -> Training:
    import timm

    model = timm.create_model("test_efficientnet", num_classes=3)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3, alpha=0.9, eps=1e-3, momentum=0.9)
    # smaller images end in maps of one pixel, whose batch norm takes torch's float32 0.01 away from its float64
    make = lambda: (torch.randn(4, 3, 64, 64), torch.randint(0, 3, (4,)))
    return one(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), [make() for _ in range(2)], optimizer)


@training("diffusion U-Net", "diffusers' UNet2DModel and DDPMScheduler")
def unet() -> Training:
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    schedule = diffusers.DDPMScheduler(num_train_timesteps=50)

    def loss(m, batch):
        x, noise, steps = batch
        return F.mse_loss(m(schedule.add_noise(x, noise, steps), steps, return_dict=False)[0], noise)

    make = lambda: (torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8), torch.randint(0, 50, (2,)))
    return one(model, loss, [make() for _ in range(2)])


@training("torchvision segmentation", "torchvision's ResNet blocks, FCN head, auxiliary loss")
def segmentation() -> Training:
    import torchvision

    block = torchvision.models.resnet.BasicBlock
    body = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1), block(8, 8), block(8, 8))
    heads = [torchvision.models.segmentation.fcn.FCNHead(8, 3) for _ in range(2)]
    for head in heads:
        head[3].p = 0.0
    model = torch.nn.ModuleDict({"body": body, "out": heads[0], "aux": heads[1]})

    def loss(m, batch):
        middle = m["body"][:2](batch[0])
        maps = m["out"](m["body"][2](middle)), m["aux"](middle)
        first, second = (F.interpolate(x, size=(12, 12), mode="bilinear", align_corners=False) for x in maps)
        cost = lambda x: F.cross_entropy(x, batch[1], ignore_index=255)
        return cost(first) + 0.5 * cost(second)

    def batch():
        labels = torch.randint(0, 3, (2, 12, 12))
        labels[:, 0] = 255
        return torch.randn(2, 3, 12, 12), labels

    return one(model, loss, [batch() for _ in range(2)])
