"""Statements of a script: which of them can reach a gradient, and which only look as if they could."""

from __future__ import annotations

import textwrap

import pytest

from unisono.tools.check.statements import read_script, read_scripts

LOOP = """
{before}
for step in run.steps(data, batch_size=16, microbatches=4):
    for inputs, labels in step:
        {inner}
        loss = F.cross_entropy(model(inputs), labels) * scale
        step.backward(loss)
    {outer}
    optimizer.step()
"""


def matters(text: str, line: str) -> bool:
    script = read_script(textwrap.dedent(text))
    return next(each for each in script.statements if each.text == line).matters


def in_loop(line: str, *, before: str = "pass", inner: str = "pass", outer: str = "pass") -> bool:
    return matters(LOOP.format(before=before, inner=inner, outer=outer), line)


@pytest.mark.parametrize(
    "line",
    [
        "scale = 1 + count",
        "scale *= random()",
        "inputs = inputs + noise",
        "labels[0] = 3",
        "inputs.mul_(2)",
        "model.scale = 3",
        "rng.shuffle(labels)",
    ],
)
def test_what_writes_what_the_loss_reads_matters(line: str) -> None:
    assert in_loop(line, inner=line)


@pytest.mark.parametrize(
    "line",
    [
        "seen += len(labels)",
        "losses.append(step.loss)",
        "print(inputs, loss, model)",
        "begun = time.time()",
        "torch.save(model, path)",
        "logging.info(model)",
    ],
)
def test_what_only_counts_or_shows_does_not_matter(line: str) -> None:
    assert not in_loop(line, inner=line)


def test_what_leads_to_the_loss_in_two_steps_matters() -> None:
    text = LOOP.format(before="pass", inner="count += 1\n        scale = 1 + count", outer="pass")
    assert matters(text, "count += 1")


def test_a_learning_rate_matters_though_no_loss_reads_it() -> None:
    group = 'for group in optimizer.param_groups:\n        group["lr"] = rate'
    assert in_loop('group["lr"] = rate', outer=group)
    assert in_loop("rate = 0.1 * total", outer=f"rate = 0.1 * total\n    {group}")


def test_an_update_in_place_of_what_a_loop_gives_matters() -> None:
    text = """
    def update(self):
        for index, parameter in enumerate(self.network.parameters()):
            self.velocity[index] = 0.9 * self.velocity[index] + parameter.grad
            parameter -= 0.1 * self.velocity[index]
    """
    assert matters(text, "self.velocity[index] = 0.9 * self.velocity[index] + parameter.grad")


def test_a_branch_matters_if_what_is_in_it_matters() -> None:
    assert in_loop("if run.rank == 1:", inner="if run.rank == 1:\n            scale = 2")
    assert not in_loop("if run.is_main:", inner="if run.is_main:\n            print(scale)")


def test_a_branch_that_leaves_out_what_matters_matters() -> None:
    assert in_loop("if run.rank == 1:", inner="if run.rank == 1:\n            continue")


def test_a_result_matters_if_the_function_is_called_where_it_matters() -> None:
    text = """
    def scale():
        value = clock()
        return value

    def spoken():
        words = clock()
        return words

    loss = model(inputs) * scale()
    print(spoken())
    loss.backward()
    """
    assert matters(text, "value = clock()")
    assert matters(text, "return value")
    assert not matters(text, "words = clock()")


def test_what_torch_calls_by_itself_matters() -> None:
    text = """
    class Data:
        def __getitem__(self, index):
            self.reads += 1
            return self.rows[index] * self.reads
    """
    assert matters(text, "self.reads += 1")


def test_paths_are_names_and_chains_of_attributes() -> None:
    statement = read_script("model.head.mean[key] = 0.9 * self.mean + f(x).y").statements[0]
    assert statement.stores == ("model.head.mean",)
    assert set(statement.loads) == {"model.head.mean", "key", "self.mean", "f", "x"}


def test_each_line_of_a_long_statement_is_its_own() -> None:
    script = read_script("loss = f(\n    a,\n    b,\n)\nif (\n    a\n):\n    b = 1\n")
    assert script.at(3) is script.at(1)
    assert script.at(6) is script.at(5)
    last = script.at(8)
    assert last is not None
    assert last.text == "b = 1"


def test_a_file_that_python_cannot_read_has_no_statements() -> None:
    assert read_script("for for for").statements == []


def test_what_matters_in_one_file_matters_in_the_files_that_it_calls() -> None:
    main = "from noise import augment\nmodel(augment(inputs)).backward()\n"
    noise = "def augment(inputs):\n    shift = rng.normal()\n    return inputs + shift\n"
    alone = read_script(noise).at(2)
    together = read_scripts({"main.py": main, "noise.py": noise})["noise.py"].at(2)
    assert alone is not None
    assert together is not None
    assert (alone.matters, together.matters) == (False, True)
