"""Every Python value that a recorded loss or forward reads is watched; what it does not read is not."""

import array
import collections
import ctypes
import dataclasses
import functools
import importlib
import operator
import sys
import types
import weakref
from contextlib import contextmanager

import pytest
import torch

from torch_bridge.lowering.python.computed_reads import computed_reads
from torch_bridge.lowering.python.inputs import PythonInputs

SETTINGS = types.SimpleNamespace()


@dataclasses.dataclass
class Options:
    weight: float = 1.0


class Base:
    scale = 1.0

    def __init__(self):
        self.weight, self.level0 = 1.0, 1.0
        self.epoch, self.history = 0, []

    def term(self, value):
        return value * self.weight

    def inherited(self):
        return 1.0

    @classmethod
    def of_class(cls):
        return cls.scale

    def add(self, value, factor):
        return value * self.weight * factor

    half = functools.partialmethod(add, factor=0.5)

    @functools.singledispatchmethod
    def dispatched(self, value):
        return value * self.weight

    def by_computed_name(self, level):
        return getattr(self, f"level{level}")

    def after_epoch(self):
        self.epoch += 1
        self.history.append(self.epoch)
        setattr(self, f"loss{self.epoch}", getattr(self, "weight", 1.0))


class Own(Base):
    options = Options()

    def term(self, value):
        return super().term(value)

    def loss(self, model, batch):
        return self.term(model(batch).sum())


class Descriptor:
    def __init__(self):
        self.value = 1.0

    def __get__(self, owner, kind=None):
        return self.value


class HasDescriptor:
    value = Descriptor()


class Meta(type):
    limit = 1.0


class OfMeta(metaclass=Meta):
    pass


class Decorator:
    def __init__(self, function):
        self.function, self.weight = function, 1.0
        functools.update_wrapper(self, function)

    def __call__(self, *arguments):
        return self.function(*arguments) * self.weight


def weighted(function):
    @functools.wraps(function)
    def wrapper(*arguments):
        return function(*arguments) * SETTINGS.weight

    return wrapper


@weighted
def decorated_loss(model, batch):
    return model(batch).sum()


@Decorator
def decorated_by_object(model, batch):
    return model(batch).sum()


@contextmanager
def current_weight():
    yield SETTINGS.weight


@functools.lru_cache
def remembered(count):
    return SETTINGS.weight * count


@functools.singledispatch
def dispatched(value):
    return value * SETTINGS.weight


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * SETTINGS.weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient * SETTINGS.weight


apply = Scaled.apply


def in_context(model, batch):
    with current_weight() as weight:
        return model(batch).sum() * weight


def read(function):
    """Return a loss that multiplies the outputs' sum with a function's value."""
    return lambda model, batch: model(batch).sum() * function()


def renewed():
    """Return fresh objects for one case."""
    vars(SETTINGS).clear()
    vars(SETTINGS).update(weight=1.0, name="weight", options=Options(), own=Own(), numbers=array.array("d", [1.0]))
    SETTINGS.table, SETTINGS.cell = {"weight": 1.0}, ctypes.c_double(1.0)
    SETTINGS.get, SETTINGS.seen = SETTINGS.table.get, types.MappingProxyType(SETTINGS.table)
    SETTINGS.weak, SETTINGS.chain = weakref.ref(SETTINGS.options), collections.ChainMap(SETTINGS.table)
    SETTINGS.bytes, SETTINGS.many = bytearray(b"a"), [[1.0] for _ in range(200)]
    SETTINGS.deep = functools.reduce(lambda inner, _: types.SimpleNamespace(inner=inner), range(12), SETTINGS.options)
    Base.scale, Own.options.weight, Meta.limit = 1.0, 1.0, 1.0
    vars(HasDescriptor)["value"].value = decorated_by_object.weight = 1.0
    return SETTINGS


CASES = {
    "classmethod": (read(Own.of_class), lambda: setattr(Base, "scale", 2.0)),
    "inherited class attribute": (read(lambda: Own.scale), lambda: setattr(Base, "scale", 2.0)),
    "class attribute that is an object": (
        read(lambda: SETTINGS.own.options.weight),
        lambda: setattr(Own.options, "weight", 2.0),
    ),
    "method that calls super()": (
        lambda model, batch: SETTINGS.own.loss(model, batch),
        lambda: setattr(SETTINGS.own, "weight", 2.0),
    ),
    "partialmethod": (read(lambda: SETTINGS.own.half(1.0)), lambda: setattr(SETTINGS.own, "weight", 2.0)),
    "singledispatchmethod": (read(lambda: SETTINGS.own.dispatched(1.0)), lambda: setattr(SETTINGS.own, "weight", 2.0)),
    "getattr(self, computed)": (
        read(lambda: SETTINGS.own.by_computed_name(0)),
        lambda: setattr(SETTINGS.own, "level0", 2.0),
    ),
    "getattr(object, computed)": (
        read(lambda: getattr(SETTINGS, SETTINGS.name)),
        lambda: setattr(SETTINGS, "weight", 2.0),
    ),
    "attrgetter": (
        read(lambda: operator.attrgetter("options.weight")(SETTINGS)),
        lambda: setattr(SETTINGS.options, "weight", 2.0),
    ),
    "asdict": (
        read(lambda: dataclasses.asdict(SETTINGS.options)["weight"]),
        lambda: setattr(SETTINGS.options, "weight", 2.0),
    ),
    "descriptor": (read(lambda: HasDescriptor().value), lambda: setattr(vars(HasDescriptor)["value"], "value", 2.0)),
    "metaclass": (read(lambda: OfMeta.limit), lambda: setattr(Meta, "limit", 2.0)),
    "decorator": (decorated_loss, lambda: setattr(SETTINGS, "weight", 2.0)),
    "decorator that is an object": (decorated_by_object, lambda: setattr(decorated_by_object, "weight", 2.0)),
    "contextmanager": (in_context, lambda: setattr(SETTINGS, "weight", 2.0)),
    "lru_cache": (read(lambda: remembered(1)), lambda: setattr(SETTINGS, "weight", 2.0)),
    "singledispatch": (read(lambda: dispatched(1.0)), lambda: setattr(SETTINGS, "weight", 2.0)),
    "autograd.Function": (
        lambda model, batch: apply(model(batch)).sum(),
        lambda: setattr(SETTINGS, "weight", 2.0),
    ),
    "weakref": (read(lambda: SETTINGS.weak().weight), lambda: setattr(SETTINGS.options, "weight", 2.0)),
    "bound method of a dict": (read(lambda: SETTINGS.get("weight")), lambda: SETTINGS.table.update(weight=2.0)),
    "MappingProxyType": (read(lambda: SETTINGS.seen["weight"]), lambda: SETTINGS.table.update(weight=2.0)),
    "ChainMap": (read(lambda: SETTINGS.chain["weight"]), lambda: SETTINGS.table.update(weight=2.0)),
    "array.array": (read(lambda: SETTINGS.numbers[0]), lambda: SETTINGS.numbers.__setitem__(0, 2.0)),
    "bytearray": (read(lambda: SETTINGS.bytes[0]), lambda: SETTINGS.bytes.__setitem__(0, 3)),
    "ctypes": (read(lambda: SETTINGS.cell.value), lambda: setattr(SETTINGS.cell, "value", 2.0)),
    "12 objects deep": (
        read(lambda: SETTINGS.deep.inner.inner.inner.inner.inner.inner.inner.inner.inner.inner.inner.inner.weight),
        lambda: setattr(SETTINGS.options, "weight", 2.0),
    ),
    "list in a long list": (read(lambda: SETTINGS.many[150][0]), lambda: SETTINGS.many[150].__setitem__(0, 2.0)),
    "default dtype": (read(torch.get_default_dtype), lambda: torch.set_default_dtype(torch.float64)),
    "replaced method": (read(lambda: SETTINGS.own.inherited()), lambda: setattr(Own, "inherited", lambda self: 2.0)),
}


@pytest.fixture(autouse=True)
def fresh():
    renewed()
    yield
    torch.set_default_dtype(torch.float32)
    vars(Own).get("inherited") and delattr(Own, "inherited")
    renewed()


def is_noticed(loss, change, model=None):
    inputs = PythonInputs(loss, {"model": model or torch.nn.Linear(2, 1)})
    before = inputs.named()
    change()
    return bool(inputs.moved()) or inputs.named() != before


@pytest.mark.parametrize("name", CASES)
def test_a_change_of_a_value_that_a_loss_reads_is_noticed(name):
    assert is_noticed(*CASES[name])


class Logging(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 1)
        self.steps, self.values, self.gain = 0, [], 1.0

    def forward(self, x):
        return self.scaled(super().forward(x))

    def scaled(self, x):
        return x * self.gain

    def log(self, value):
        self.steps += 1
        self.values.append(value)


def test_what_only_other_methods_of_a_model_read_is_not_watched():
    model = Logging()
    assert not is_noticed(lambda model, batch: model(batch).sum(), lambda: model.log(1.0), model)


def test_what_a_method_that_forward_calls_reads_is_watched():
    model = Logging()
    assert is_noticed(lambda model, batch: model(batch).sum(), lambda: setattr(model, "gain", 2.0), model)


class ByComputedName(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale0, self.scale1 = torch.nn.Linear(2, 1), 1.0, 1.0

    def forward(self, x):
        return self.layer(x) * sum([getattr(self, f"scale{level}") for level in range(2)])


def test_a_module_attribute_read_by_a_computed_name_is_watched():
    model = ByComputedName()
    assert is_noticed(lambda model, batch: model(batch).sum(), lambda: setattr(model, "scale1", 2.0), model)


def test_a_step_does_not_compare_a_buffer_of_more_than_65536_bytes():
    SETTINGS.bytes = bytearray(1 << 20)
    inputs = PythonInputs(read(lambda: SETTINGS.bytes[0]), {"model": torch.nn.Linear(2, 1)})
    assert not any(isinstance(value, bytes) for value in inputs.values())


class Hook:
    scale = 1.0

    def __call__(self, module, arguments, output):
        return output * self.scale


def test_an_attribute_of_a_hook_that_is_an_object_is_watched():
    model, hook = torch.nn.Linear(2, 1), Hook()
    model.register_forward_hook(hook)
    assert is_noticed(lambda model, batch: model(batch).sum(), lambda: setattr(hook, "scale", 2.0), model)


IMPORTS = {
    "import": "import watched_package.values as v; return model(batch).sum() * v.weight",
    "from import": "from watched_package.values import weight; return model(batch).sum() * weight",
    "relative import": "from .values import weight; return model(batch).sum() * weight",
    "relative import of a module": "from . import values; return model(batch).sum() * values.weight",
    "sys.modules": "return model(batch).sum() * sys.modules['watched_package.values'].weight",
    "getattr of a module": "return model(batch).sum() * getattr(top, name)",
}


@pytest.mark.parametrize("name", IMPORTS)
def test_a_value_of_a_module_imported_inside_the_loss_is_watched(name, tmp_path, monkeypatch):
    package = tmp_path / "watched_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "values.py").write_text("weight = 1.0\n")
    head = "import sys\nfrom . import values as top\nname = 'weight'\n"
    (package / "losses.py").write_text(f"{head}def loss(model, batch):\n    {IMPORTS[name]}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        loss = importlib.import_module("watched_package.losses").loss
        values = sys.modules["watched_package.values"]
        assert is_noticed(loss, lambda: setattr(values, "weight", 2.0))
    finally:
        for module in [module for module in sys.modules if module.startswith("watched_package")]:
            del sys.modules[module]


def test_a_relative_import_outside_of_a_package_is_left_to_python():
    scope = {"__package__": None}
    exec("def loss(model, batch):\n    from .missing import weight\n    return model(batch).sum() * weight", scope)
    assert not is_noticed(scope["loss"], lambda: None)


CODES = [
    (lambda self: getattr(self, "a", self.b.c), set()),
    (lambda self: getattr(self.options, "a", getattr(self, "b", None)), set()),
    (lambda self: hasattr(self, "a") and self.a, set()),
    (lambda self, i: getattr(self, f"a{i}"), {"self"}),
    (lambda self, i: getattr(self, "a" + i, None), {"self"}),
    (lambda self, i: getattr(self, "a{}".format(i)), {"self"}),  # noqa: UP032
    (lambda self, i: [getattr(self, f"a{level}") for level in range(i)], {"self"}),
    (lambda self: vars(self), {"self"}),
    (lambda self: self.__dict__["a"], {"self"}),
    (lambda self, i: getattr(self.options, f"a{i}"), {""}),
    (lambda self, i: getattr(i, f"a{i}"), {""}),
    (lambda i: getattr(torch.nn, i), {"torch.nn"}),
    (lambda: dataclasses.asdict(SETTINGS), {""}),
]


@pytest.mark.parametrize("number", range(len(CODES)))
def test_code_tells_whose_attributes_it_reads_by_computed_names(number):
    function, owners = CODES[number]
    assert computed_reads(function.__code__) == owners
