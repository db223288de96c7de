"""`parallelize`: cuts layers of a model into shards."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from unisono.core.errors import UsageError
from unisono.core.words import listed
from unisono.strategies.parallel import functions as functions
from unisono.strategies.parallel.layers import Columns, CutLayer, Cuts, Rows, Vocabulary, layers_in
from unisono.strategies.parallel.place import Place

__all__ = ["assemble", "parallelize"]

Model = TypeVar("Model", bound=nn.Module)


def parallelize(model: Model, plan: Mapping[str, str], *, shards: int) -> Model:
    """Cut layers of a model into T shards, which the processes of a group carry: tensor parallelism.

    The shards are part of the recipe: each is computed by itself, and what they give is summed by a binary tree over
    all T, on one process as well. Which processes carry them is not. For training, put the model into
    `unisono.Stages`::

        model = GPT()  # with its initial values, or those of a checkpoint
        unisono.parallelize(
            model,
            {"*.queries_keys_values": "columns:3", "*.attended": "rows", "*.up": "columns", "*.down": "rows"},
            shards=4,
        )
        model = unisono.Stages(model, cuts=1).to(run.device)

    ``unisono run train.py --workers 2x4`` trains it with two groups of four processes, each with a fourth of the cut
    layers and all of the others.

    - ``"columns"``: of an ``nn.Linear``; each shard has a part of its output. The code that follows sees a tensor of
      the whole shape, of which each shard computes its own part: activation functions, dropout, attention by heads, and
      ``F.cross_entropy`` over classes.
    - ``"columns:3"``: the output is three tensors one behind the other, as queries, keys and values often are, and each
      of them is cut.
    - ``"rows"``: of an ``nn.Linear``; each shard has a part of its input. The output is whole again.
    - ``"vocabulary"``: of an ``nn.Embedding``, each shard has some of the entries; of an ``nn.Linear``, as "columns".

    Weights that are tied stay tied where both layers are cut alike. The parameter ``weight`` of a layer becomes
    ``weight.0`` to ``weight.T-1``.

    Args:
        model: changed in place; the layers themselves cannot be the model.
        plan: by pattern of module names (``*`` stands for anything), how these layers are cut.
        shards: T, a power of two, of which the sizes that are cut are multiples; 1: the model stays as it is.

    Returns:
        The model.

    Raises:
        UsageError: a pattern names no layer, or one that cannot be cut so.

    Source: Shoeybi et al., "Megatron-LM", 2019.
    """
    if not isinstance(shards, int) or shards < 1 or shards & (shards - 1):
        raise UsageError(f"unisono.parallelize got shards={shards!r}, which is no power of two: take 2, 4, 8 ...")
    if not isinstance(plan, Mapping) or not plan:
        raise UsageError(
            f"unisono.parallelize needs a plan such as {{'*.up': 'columns', '*.down': 'rows'}}; got {plan!r}"
        )
    if layers_in(model):
        raise UsageError(
            "unisono.parallelize got a model with layers that are cut already: give all patterns in one call"
        )
    if shards == 1:
        return model
    names = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    chosen: dict[str, str] = {}
    for pattern, how in plan.items():
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            known = [name for name, module in names.items() if isinstance(module, nn.Linear | nn.Embedding)]
            raise UsageError(
                f"unisono.parallelize: no module matches {pattern!r}; "
                + (
                    f"those that can be cut are {listed(known[:8])}{', ...' * (len(known) > 8)}"
                    if known
                    else "none can be cut"
                )
            )
        for name in found:
            if chosen.setdefault(name, how) != how:
                raise UsageError(f"unisono.parallelize: {name} is cut by {chosen[name]!r} and by {how!r}: choose one")
    place, cuts = Place(shards), Cuts()
    layers: dict[int, CutLayer] = {}
    for name, how in chosen.items():
        if id(names[name]) not in layers:
            layers[id(names[name])] = _cut(name, names[name], how, place, cuts)
    for name, module in names.items():
        tied = [one for one in module._parameters.values() if id(one) in cuts.known]
        if id(module) not in layers and tied:
            raise UsageError(
                f"unisono.parallelize: a weight of {name} is tied to that of a layer that is cut, and {name} is not: "
                "cut both, or neither"
            )
    cuts.note()
    for name, module in names.items():
        if (layer := layers.get(id(module))) is not None:
            _replace(model, name, layer.train(module.training))
    return model


def assemble(model: Model) -> Model:
    """Make ordinary layers of those that `parallelize` has cut, with the weights that they have now. Local.

    For a trained model that other programs are to use: make the model as for the training, load the weights of a
    checkpoint (`unisono.load_weights`), and assemble it on one process.

    Args:
        model: changed in place.

    Returns:
        The model.

    Raises:
        UsageError: some shards are on other processes.
    """
    layers = {name: one for name, one in model.named_modules(remove_duplicate=False) if isinstance(one, CutLayer)}
    for name, layer in layers.items():
        if any(one.is_meta for one in layer.parameters()):
            raise UsageError(
                f"unisono.assemble: {name} has shards on other processes of the group: assemble the model of a "
                "checkpoint, in a program of one process"
            )
    known: dict[int, nn.Parameter] = {}
    made = {id(layer): layer.assembled(known).train(layer.training) for layer in layers.values()}
    for name, layer in layers.items():
        _replace(model, name, made[id(layer)])
    return model


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, layer)


def _cut(name: str, module: nn.Module, how: str, place: Place, cuts: Cuts) -> CutLayer:
    kind, _, number = str(how).partition(":")
    if kind not in ("columns", "rows", "vocabulary") or (
        number and (kind != "columns" or not number.isdecimal() or not int(number))
    ):
        raise UsageError(
            f"unisono.parallelize: {name} is to be cut by {how!r}: there are columns, columns:3, rows and vocabulary"
        )
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise UsageError(f"unisono.parallelize: {name} has hooks, which the shards would not have: register them later")
    if type(module) is nn.Embedding and kind == "vocabulary":
        return Vocabulary(module, place, cuts)
    if type(module) is not nn.Linear:
        wanted = "nn.Linear or nn.Embedding" if kind == "vocabulary" else "nn.Linear"
        raise UsageError(
            f"unisono.parallelize: {name} is a {type(module).__qualname__}, and {how!r} cuts an {wanted}; attention "
            "has to be written with these (nn.MultiheadAttention computes with its weights itself)"
        )
    if kind == "rows":
        return Rows(module, place, cuts)
    return Columns(module, place, cuts, int(number or 1))
