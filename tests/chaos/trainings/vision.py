# ruff: noqa: E501  # tables of settings read better in whole lines
"""Image classification, detection, segmentation and self-supervised learning."""

import copy

import timm
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.nn import functional as F

from tests.chaos.trainings import Training, Update, one, repeated, training


def labelled_images(size: int = 32, classes: int = 10, rows: int = 8):
    return repeated(
        lambda g: (torch.randn(rows, 3, size, size, generator=g), torch.randint(classes, (rows,), generator=g))
    )


def cross_entropy(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


@training("kuangliu/pytorch-cifar: SGD with momentum, cosine schedule")
def resnet_cifar():
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    return Training({"model": model}, {"loss": Update(cross_entropy, optimizer, schedule)}, labelled_images(64))


@training("pytorch/vision references/classification: label smoothing, depthwise convolutions")
def mobilenet():
    torch.manual_seed(0)
    model = timm.create_model("mobilenetv3_small_050", num_classes=10, drop_rate=0.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True)
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)
    return Training({"model": model}, {"loss": Update(loss, optimizer)}, labelled_images(64))


@training("facebookresearch/deit: ViT with mixup targets")
def vit_mixup():
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 10}
    model = timm.models.vision_transformer.VisionTransformer(**sizes)

    def batch(g):
        images, labels = torch.randn(8, 3, 32, 32, generator=g), torch.randint(10, (8,), generator=g)
        share = torch.rand(8, 1, generator=g)
        targets = share * F.one_hot(labels, 10) + (1 - share) * F.one_hot(labels.flip(0), 10)
        return share[..., None, None] * images + (1 - share[..., None, None]) * images.flip(0), targets

    return one(model, lambda model, b: torch.sum(-b[1] * F.log_softmax(model(b[0]), -1), -1).mean(), repeated(batch))


@training("facebookresearch/ConvNeXt")
def convnext():
    torch.manual_seed(0)
    model = timm.models.convnext.ConvNeXt(depths=(1, 1, 2, 1), dims=(16, 24, 32, 48), num_classes=10)
    return one(model, cross_entropy, labelled_images(64, rows=4))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        block = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True))
        self.down1, self.down2, self.middle = block(3, 8), block(8, 16), block(16, 32)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join2, self.join1 = block(32, 16), block(16, 8)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(self.pool(first))
        x = self.up2(self.middle(self.pool(second)))
        x = self.up1(self.join2(torch.cat([second, x], 1)))
        return self.head(self.join1(torch.cat([first, x], 1)))


@training("milesial/Pytorch-UNet: binary cross-entropy and Dice")
def unet_dice():
    torch.manual_seed(0)
    model = UNet()

    def loss(model, batch):
        images, masks = batch
        logits = model(images).squeeze(1)
        p = torch.sigmoid(logits)
        inner = 2 * (p * masks).sum((-1, -2))
        sets = p.sum((-1, -2)) + masks.sum((-1, -2))
        sets = torch.where(sets == 0, inner, sets)
        return F.binary_cross_entropy_with_logits(logits, masks) + 1 - ((inner + 1e-6) / (sets + 1e-6)).mean()

    data = repeated(
        lambda g: (torch.randn(4, 3, 32, 32, generator=g), (torch.rand(4, 32, 32, generator=g) > 0.6).float())
    )
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-4, weight_decay=1e-8, momentum=0.9)
    return Training({"model": model}, {"loss": Update(loss, optimizer)}, data)


class Detector(nn.Module):
    """A grid of boxes: x, y, width, height, objectness and classes for each cell."""

    def __init__(self, classes: int = 3):
        super().__init__()
        layers = [(3, 8), (8, 16), (16, 16)]
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(i, o, 3, stride=2, padding=1), nn.BatchNorm2d(o), nn.SiLU()) for i, o in layers)
        )
        self.head = nn.Conv2d(16, 5 + classes, 1)

    def forward(self, x):
        return self.head(self.body(x)).permute(0, 2, 3, 1)


@training("ultralytics/yolov5: one target row per object, counts that depend on the data")
def yolo():
    torch.manual_seed(0)
    model = Detector()

    def batch(g):
        rows = []
        for image in range(4):
            count = int(torch.randint(1, 5, (), generator=g))
            numbers = torch.rand(count, 4, generator=g) * 0.8 + 0.1
            classes = torch.randint(3, (count, 1), generator=g).float()
            rows.append(torch.cat([torch.full((count, 1), float(image)), classes, numbers], 1))
        return torch.randn(4, 3, 32, 32, generator=g), torch.cat(rows)

    def loss(model, batch):
        images, targets = batch
        p = model(images)
        size = p.shape[1]
        image, label = targets[:, 0].long(), targets[:, 1].long()
        at = targets[:, 2:4] * size
        column, row = at.long().clamp(0, size - 1).T
        chosen = p[image, row, column]
        xy, wh = chosen[:, :2].sigmoid(), (chosen[:, 2:4].sigmoid() * 2) ** 2
        box = F.mse_loss(xy, at - at.floor()) + F.mse_loss(wh, targets[:, 4:6] * 2)
        objects = torch.zeros_like(p[..., 4])
        objects[image, row, column] = 1.0
        return box + F.binary_cross_entropy_with_logits(p[..., 4], objects) + F.cross_entropy(chosen[:, 5:], label)

    return one(model, loss, repeated(batch))


@training("facebookresearch/detr: Hungarian matching by scipy")
def detr():
    torch.manual_seed(0)

    class Detr(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Conv2d(3, 32, 8, stride=8)
            self.transformer = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
            self.queries, self.position = nn.Parameter(torch.randn(6, 32)), nn.Parameter(torch.randn(16, 32))
            self.classes, self.boxes = nn.Linear(32, 4), nn.Linear(32, 4)

        def forward(self, x):
            tokens = self.backbone(x).flatten(2).transpose(1, 2) + self.position
            h = self.transformer(tokens, self.queries.expand(len(x), -1, -1))
            return self.classes(h), self.boxes(h).sigmoid()

    def loss(model, batch):
        images, labels, boxes = batch
        logits, predicted = model(images)
        cost = -logits.softmax(-1)[:, :, :3].gather(2, labels[:, None].expand(-1, 6, -1)) + torch.cdist(
            predicted, boxes, p=1
        )
        pairs = [linear_sum_assignment(c) for c in cost.detach().cpu().numpy()]
        image = torch.cat([torch.full((len(i),), n) for n, (i, _) in enumerate(pairs)])
        query = torch.cat([torch.as_tensor(i) for i, _ in pairs])
        target = torch.cat([torch.as_tensor(j) for _, j in pairs])
        wanted = torch.full(logits.shape[:2], 3, dtype=torch.long)
        wanted[image, query] = labels[image, target]
        return F.cross_entropy(logits.transpose(1, 2), wanted) + F.l1_loss(
            predicted[image, query], boxes[image, target]
        )

    return one(
        Detr(), loss,
        repeated(lambda g: (torch.randn(2, 3, 32, 32, generator=g), torch.randint(3, (2, 3), generator=g), torch.rand(2, 3, 4, generator=g))),
        rate=1e-4,
    )  # fmt: skip


class MultiCropWrapper(nn.Module):
    """Run the backbone once per crop size and the head on all rows, as facebookresearch/dino does."""

    def __init__(self, backbone, head):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x):
        if not isinstance(x, list):
            x = [x]
        sizes = torch.unique_consecutive(torch.tensor([crop.shape[-1] for crop in x]), return_counts=True)[1]
        start, output = 0, torch.empty(0)
        for end in torch.cumsum(sizes, 0):
            out = self.backbone(torch.cat(x[start:end]))
            output = torch.cat((output, out))
            start = end
        return self.head(output)


@training("facebookresearch/dino: multi-crop wrapper, averaged teacher, centre")
def dino():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    student = MultiCropWrapper(backbone, nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 12)))
    teacher = copy.deepcopy(student)
    teacher.requires_grad_(False)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(1, 12))

        def forward(self, student_out, teacher_out):
            students = (student_out / 0.1).chunk(4)
            teachers = F.softmax((teacher_out - self.centre) / 0.04, -1).detach().chunk(2)
            total, terms = 0.0, 0
            for i, t in enumerate(teachers):
                for j, s in enumerate(students):
                    if i == j:
                        continue
                    total = total + torch.sum(-t * F.log_softmax(s, -1), -1).mean()
                    terms += 1
            self.update_centre(teacher_out)
            return total / terms

        @torch.no_grad()
        def update_centre(self, teacher_out):
            self.centre = self.centre * 0.9 + teacher_out.mean(0, keepdim=True) * 0.1

    criterion = Loss()

    def loss(student, teacher, criterion, crops):
        return criterion(student(crops), teacher(crops[:2]))

    def average(modules):
        with torch.no_grad():
            for s, t in zip(modules["student"].parameters(), modules["teacher"].parameters(), strict=True):
                t.mul_(0.99).add_((1 - 0.99) * s.detach())

    data = repeated(lambda g: [torch.randn(4, 3, size, size, generator=g) for size in (32, 32, 16, 16)])
    modules = {"student": student, "teacher": teacher, "criterion": criterion}
    update = Update(loss, torch.optim.AdamW(student.parameters(), 1e-3))
    return Training(modules, {"loss": update}, data, average)


@training("sthalles/SimCLR: NT-Xent over two views")
def simclr():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 16)
    )

    def loss(model, views):
        features = F.normalize(model(torch.cat(views)), dim=1)
        labels = torch.cat([torch.arange(8) for _ in range(2)])
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        similarity = features @ features.T
        mask = torch.eye(16, dtype=torch.bool)
        labels, similarity = labels[~mask].view(16, -1), similarity[~mask].view(16, -1)
        positives = similarity[labels.bool()].view(16, -1)
        negatives = similarity[~labels.bool()].view(16, -1)
        return F.cross_entropy(torch.cat([positives, negatives], 1) / 0.07, torch.zeros(16, dtype=torch.long))

    return one(model, loss, repeated(lambda g: [torch.randn(8, 3, 16, 16, generator=g) for _ in range(2)]))


@training("facebookresearch/mae: masks by argsort of noise")
def masked_autoencoder():
    torch.manual_seed(0)

    class Mae(nn.Module):
        def __init__(self):
            super().__init__()
            layer = lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, activation="gelu")
            self.embed, self.encoder, self.decoder = nn.Linear(48, 32), layer(), layer()
            self.position, self.mask_token = (
                nn.Parameter(torch.randn(16, 32) * 0.02),
                nn.Parameter(torch.zeros(1, 1, 32)),
            )
            self.head = nn.Linear(32, 48)

        def forward(self, patches, noise):
            order = torch.argsort(noise, dim=1)
            back = torch.argsort(order, dim=1)
            kept = order[:, :4]
            x = self.embed(patches) + self.position
            x = self.encoder(torch.gather(x, 1, kept[..., None].expand(-1, -1, 32)))
            x = torch.cat([x, self.mask_token.expand(len(x), 12, -1)], 1)
            x = torch.gather(x, 1, back[..., None].expand(-1, -1, 32)) + self.position
            mask = torch.ones(len(x), 16)
            mask[:, :4] = 0
            return self.head(self.decoder(x)), torch.gather(mask, 1, back)

    def loss(model, batch):
        patches, noise = batch
        predicted, mask = model(patches, noise)
        mean, var = patches.mean(-1, keepdim=True), patches.var(-1, keepdim=True)
        each = ((predicted - (patches - mean) / (var + 1e-6) ** 0.5) ** 2).mean(-1)
        return (each * mask).sum() / mask.sum()

    return one(Mae(), loss, repeated(lambda g: (torch.randn(4, 16, 48, generator=g), torch.rand(4, 16, generator=g))))


@training("facebookresearch/swav: Sinkhorn assignments, normalized prototypes")
def swav():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 16))
    prototypes = nn.Linear(16, 6, bias=False)

    @torch.no_grad()
    def sinkhorn(scores):
        q = torch.exp(scores / 0.05).T
        q = q / q.sum()
        for _ in range(3):
            q = q / q.sum(1, keepdim=True) / 6
            q = q / q.sum(0, keepdim=True) / q.shape[1]
        return (q * q.shape[1]).T

    def loss(model, prototypes, views):
        with torch.no_grad():
            prototypes.weight.copy_(F.normalize(prototypes.weight.data.clone(), dim=1))
        scores = [prototypes(F.normalize(model(v), dim=1)) for v in views]
        q = [sinkhorn(s.detach()) for s in scores]
        return -0.5 * sum((q[i] * F.log_softmax(scores[1 - i] / 0.1, 1)).sum(1).mean() for i in range(2))

    data = repeated(lambda g: [torch.randn(12, 3, 8, 8, generator=g) for _ in range(2)])
    optimizer = torch.optim.SGD([*model.parameters(), *prototypes.parameters()], 0.05, momentum=0.9)
    return Training({"model": model, "prototypes": prototypes}, {"loss": Update(loss, optimizer)}, data)
