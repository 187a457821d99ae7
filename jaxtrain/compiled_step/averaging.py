"""Exchange buffers and gradients between the processes of DistributedDataParallel modules, around a compiled step."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.compiled_step.shared_weights import Arrays, SharedWeights
from jaxtrain.errors import UserError

Forwards = Sequence[tuple[str, bool]]


class Averaging:
    """Exchanges of buffers and gradients for one step. held: names of the parameters of its optimizer.

    Every process makes them in the same order, first by forward pass, then by module, whether it runs its step compiled
    or in torch.
    """

    def __init__(self, weights: SharedWeights, held: Sequence[str]):
        self.weights, self.replicas, self.held = weights, weights.replicas, set(held)
        self.due: set[str] = set()  # modules whose waiting gradients are averaged before the update

    def unreached(self, forwards: Forwards, reached: Collection[str]) -> dict[str, str]:
        """Return, by module, one parameter without a gradient that torch's backward pass would wait for."""
        found: dict[str, str] = {}
        for name in {name for name, wanted in forwards if wanted and name in self.replicas.averaged}:
            keys = self._keys(name)
            missing = [key for key in keys if key not in reached]
            if 0 < len(missing) < len(keys) and not self.replicas.allows_unused(name):
                found[name] = missing[0]
        return found

    def begin(self, forwards: Forwards, unreached: Mapping[str, str], grads: Mapping[str, Any]) -> Mapping[str, Any]:
        """Prepare a call whose loss runs these forward passes, after the buffers were exchanged.

        Return the waiting gradients. Those that are due are averaged first if this call is inside no_sync(), because
        the gradients that it adds are not averaged. Raises UserError for `unreached` parameters whose module averages.
        """
        now: dict[str, bool] = {}
        for name, wanted in forwards:
            if name in self.replicas.averaged:
                now[name] = now.get(name, False) or (wanted and self.replicas.syncs(name))
        for name, missing in unreached.items():
            if now[name]:
                refuse_unreached(name, missing)
        early = {name for name, averages in now.items() if not averages} & self.due
        self.due = (self.due - early) | {name for name, averages in now.items() if averages}
        return self._averaged(grads, early) if early else grads

    def receive_buffers(self, forwards: Forwards) -> None:
        """Copy the first process's buffers into the modules that a program calls, as DistributedDataParallel does."""
        for name in dict.fromkeys(name for name, _ in forwards):
            held = self.replicas.buffers(name) if name in self.replicas.averaged else []
            keys = list(dict.fromkeys(self.weights.names[id(buffer)] for buffer in held))
            if not keys:
                continue
            values = jax.device_get([self.weights.arrays[key] for key in keys])
            received = self.replicas.broadcast(name, values)
            if received is not None:
                as_wide = self.weights.exchange.as_wide
                values = [as_wide(value) if value.dtype == np.int64 else value for value in received]
                placed = jax.device_put(values, self.weights.layout.replicated)
                self.weights.arrays.update(zip(keys, placed, strict=True))
        for name, wanted in forwards:
            self.replicas.note(name, wanted)

    def settle(self, grads: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the gradients for an update, averaged where averaging is due."""
        due, self.due = self.due, set()
        return self._averaged(grads, due) if due else grads

    def _averaged(self, grads: Mapping[str, Any], names: set[str]) -> Arrays:
        grads = dict(grads)
        for name in self.replicas.averaged:
            if name in names:
                grads |= self._means(name, grads)
        return grads

    def _means(self, name: str, grads: Mapping[str, Any]) -> Arrays:
        """Return the means of a module's gradients over its processes."""
        keys = self._keys(name)
        used = [key in grads for key in keys]
        if self.replicas.allows_unused(name) and keys:
            used = self.replicas.any(name, used)  # a gradient in one process counts in all of them
        elif any(used) and not all(used):
            refuse_unreached(name, keys[used.index(False)])
        kinds: dict[Any, list[str]] = {}
        for key in (key for key, one in zip(keys, used, strict=True) if one):
            kinds.setdefault(self.weights.arrays[key].dtype, []).append(key)
        like = self.weights.arrays
        own = lambda key: grads[key] if key in grads else jnp.zeros_like(like[key])
        vectors = [np.asarray(_joined([own(key) for key in group])) for group in kinds.values()]
        means: dict[str, np.ndarray] = {}
        for group, vector in zip(kinds.values(), self.replicas.mean(name, vectors), strict=True):
            pieces = np.split(vector, np.cumsum([like[key].size for key in group])[:-1])
            means |= {key: piece.reshape(like[key].shape) for key, piece in zip(group, pieces, strict=True)}
        placed = jax.device_put(list(means.values()), self.weights.layout.replicated)
        return dict(zip(means, placed, strict=True))

    def _keys(self, name: str) -> list[str]:
        """Return the parameters of the step's optimizer whose gradients are averaged over this module's processes."""
        names = [self.weights.names.get(id(parameter)) for parameter in self.replicas.parameters(name)]
        return [key for key in names if key in self.held]


@jax.jit
def _joined(arrays: list[Any]) -> jax.Array:
    return jnp.concatenate([jnp.ravel(array) for array in arrays])


def refuse_unreached(name: str, missing: str) -> None:
    """Raise UserError for a parameter without a gradient, for which torch's backward pass would wait."""
    raise UserError(
        f"{name}: {missing} gets no gradient from this loss, and DistributedDataParallel waits for every parameter's "
        "(torch ends in an error at the next forward pass): wrap the module with find_unused_parameters=True"
    )
