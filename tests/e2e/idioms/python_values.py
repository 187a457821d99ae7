"""Idioms around Python values: numbers, counters, containers, texts, prints."""

import collections
import logging
import math

from torch.nn import functional as F

from tests.e2e.idioms.case import Case, Net, adamw, batches, case, labelled, mse, net

logger = logging.getLogger("user")
logger.addHandler(logging.NullHandler())


@case
def attribute_beta():
    def before(n, m):
        m.beta = n / 1000

    return Case(Net(), lambda m, b: mse(m, b) + m.beta * m(b[0]).pow(2).mean(), adamw, batches(), before)


@case
def counter_in_forward():
    class C(Net):
        def setup(self):
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    m = C()
    return Case(m, mse, adamw, batches(), observe=lambda: [m.calls])


@case
def counter_that_warms_up():
    class C(Net):
        def setup(self):
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * min(1.0, self.calls / 10)

    m = C()
    return Case(m, mse, adamw, batches(), observe=lambda: [m.calls])


@case
def branch_on_number():
    def before(n, m):
        m.step = n

    def loss(m, b):
        base = mse(m, b)
        if m.step > 5:
            base = base + 0.1 * sum(p.abs().sum() for p in m.parameters())
        return base

    return Case(Net(), loss, adamw, batches(), before)


@case
def branch_every_third():
    def before(n, m):
        m.step = n

    def loss(m, b):
        base = mse(m, b)
        if m.step % 3 == 0:
            base = base + 0.1 * m(b[0]).abs().mean()
        return base

    return Case(Net(), loss, adamw, batches(16), before)


@case
def float_branch():
    def before(n, m):
        m.beta = n / 12

    def loss(m, b):
        return mse(m, b) + (m.beta if m.beta > 0.5 else 0.0) * m(b[0]).pow(2).mean()

    return Case(Net(), loss, adamw, batches(), before)


@case
def math_of_number():
    def before(n, m):
        m.step = n

    def loss(m, b):
        return mse(m, b) * (0.5 * (1 + math.cos(math.pi * m.step / 12)) + 0.1)

    return Case(Net(), loss, adamw, batches(), before)


GLOBAL_WEIGHT = 0.1


@case
def global_that_changes():
    def before(n, m):
        global GLOBAL_WEIGHT
        GLOBAL_WEIGHT = 0.1 * n

    def loss(m, b):
        return mse(m, b) + GLOBAL_WEIGHT * m(b[0]).pow(2).mean()

    return Case(Net(), loss, adamw, batches(), before)


@case
def text_in_batch():
    data = [{"x": x, "y": y, "mode": "ab"[n % 2], "path": f"/data/{n}.png"} for n, (x, y) in enumerate(batches())]

    def loss(m, b):
        e = m(b["x"]) - b["y"]
        return e.abs().mean() if b["mode"] == "a" else e.pow(2).mean()

    return Case(Net(), loss, adamw, data)


@case
def lookup_by_number():
    table = [0.5, 1.0, 2.0]

    def before(n, m):
        m.step = n

    return Case(Net(), lambda m, b: mse(m, b) * table[m.step % 3], adamw, batches(), before)


@case
def features_list_by_hooks():
    m, features = Net(), []
    for part in (m.a, m.b):
        part.register_forward_hook(lambda mod, i, o: features.append(o))

    def loss(m, b):
        features.clear()
        base = mse(m, b)
        return base + 0.1 * sum(f.pow(2).mean() for f in features)

    return Case(m, loss, adamw, batches(), observe=lambda: [len(features)])


@case
def running_average_in_python():
    class C(Net):
        def setup(self):
            self.mean = 1.0

    m = C()

    def loss(m, b):
        base = mse(m, b)
        m.mean = 0.9 * m.mean + 0.1 * base.item()
        return base / m.mean

    return Case(m, loss, adamw, batches(), observe=lambda: [m.mean])


@case
def tensors_appended():
    kept = []

    def loss(m, b):
        base = mse(m, b)
        kept.append(base.detach())
        return base

    return Case(Net(), loss, adamw, batches(), observe=lambda: [float(k) for k in kept])


@case
def deque_of_losses():
    kept = collections.deque(maxlen=4)

    def loss(m, b):
        base = mse(m, b)
        kept.append(base.item())
        return base / (sum(kept) / len(kept))

    return Case(Net(), loss, adamw, batches(), observe=lambda: list(kept))


@case
def prints():
    def loss(m, b):
        base = mse(m, b)
        print("loss", base)
        return base

    return Case(Net(), loss, adamw, batches())


@case
def logs_every_fifth():
    def before(n, m):
        m.step = n

    def loss(m, b):
        base = mse(m, b)
        if m.step % 5 == 0:
            logger.info("step %d loss %f", m.step, base.item())
        return base

    return Case(Net(), loss, adamw, batches(), before)


@case
def returns_logs():
    def loss(m, b):
        base = mse(m, b)
        return base, {"mse": base.detach(), "size": m(b[0]).detach().abs().mean()}

    return Case(Net(), loss, adamw, batches())


@case
def writes_to_batch():
    def loss(m, b):
        x, y = b
        y[y == 0] = -100
        return F.cross_entropy(m(x), y)

    return Case(net(4), loss, adamw, labelled())
