"""The explorers without a browser: callbacks are plain functions, and pictures are read back and held against torch."""

import random
import re
import xml.etree.ElementTree as ElementTree
from itertools import product

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from course_utils.explorers import memory_format, strides

PRESSES = {
    "transpose": {"dim": 0, "other": 1},
    "permute": {"words": "1, 0"},
    "slice": {"dim": 1, "words": "1::2"},
    "expand": {"words": "2, 3, 4"},
    "unfold": {"dim": 1, "size": 2, "step": 1},
    "view": {"words": "2, -1"},
    "reshape": {"words": "6, 2"},
    "contiguous": {},
    "flip": {"dim": 1},
}
DOES = {
    "transpose": lambda t: t.transpose(0, 1),
    "permute": lambda t: t.permute(1, 0),
    "slice": lambda t: t[:, 1::2],
    "expand": lambda t: t.expand(2, 3, 4),
    "unfold": lambda t: t.unfold(1, 2, 1),
    "view": lambda t: t.view(2, -1),
    "reshape": lambda t: t.reshape(6, 2),
    "contiguous": lambda t: t.contiguous(),
    "flip": lambda t: t.flip(1),
}


def state_of(code="torch.arange(12).view(3, 4)", *steps):
    state = strides.begin(eval(code), code)
    for step in steps:
        state = strides.apply(state, step)
        assert not state.message, state.message
    return state


def picture(svg):
    root = ElementTree.fromstring(svg)
    assert float(root.get("viewBox").split()[2]) <= 900 and float(root.get("width")) <= 900
    return root


def cells(root, kind=""):
    return [node for node in root.iter() if {"cell", *kind.split()} <= set(node.get("class", "").split())]


def inside(root):
    """Every rectangle and text lies in the picture, if a letter is 8.2 px wide."""
    width, height = map(float, root.get("viewBox").split()[2:])
    for node in root.iter():
        tag = node.tag.rpartition("}")[2]
        if tag == "rect":
            assert float(node.get("x")) >= 0 and float(node.get("x")) + float(node.get("width")) <= width
        if tag in ("rect", "text"):
            assert 0 <= float(node.get("y")) <= height
        if tag == "text" and not {"mid", "end"} & set(node.get("class").split()) and node.get("class") != "mono":
            assert float(node.get("x")) + 8.2 * len(node.text or "") <= width + 10, node.text


def brute_force_slots(tensor):
    start, size = tensor.untyped_storage().data_ptr(), tensor.element_size()
    return {
        str(list(index)): (tensor[index].data_ptr() - start) // size for index in product(*map(range, tensor.shape))
    }


def drawn_slots(root):
    found = {}
    for node in root.iter():
        label = re.fullmatch(r"element (\[.*\]) = .*, storage slot (\d+)", node.get("aria-label", ""))
        if label:
            assert f"k{label[2]}" in node.get("class").split() and node.get("tabindex") == "0"
            found[label[1]] = int(label[2])
    return found


@pytest.mark.parametrize("name", strides.USES)
def test_every_operation_from_its_controls(name):
    ui = strides.build()
    before = ui.picture.value
    ui.operation.value = name
    for control, value in PRESSES[name].items():
        getattr(ui, control).value = value
    start = ui.state.tensor
    ui.apply.click()
    expected = DOES[name](start)
    assert (
        ui.state.message == ""
        and torch.equal(ui.state.tensor, expected)
        and ui.state.tensor.stride() == expected.stride()
    )
    assert ui.picture.value != before
    rebuilt = eval(ui.state.code)
    assert torch.equal(rebuilt, expected) and rebuilt.stride() == expected.stride()
    copies = expected.untyped_storage().data_ptr() != start.untyped_storage().data_ptr()
    assert ui.state.copied == (expected.untyped_storage().nbytes() if copies else 0)
    assert ui.state.outcome == ("a copy" if copies else "the same tensor" if expected is start else "a view")


def test_undo_and_reset_return_to_the_very_picture():
    ui = strides.build()
    first = ui.picture.value
    ui.apply.click()
    second = ui.picture.value
    ui.operation.value = "contiguous"
    ui.apply.click()
    assert len({first, second, ui.picture.value}) == 3
    ui.undo.click()
    assert ui.picture.value == second
    ui.undo.click()
    ui.undo.click()
    assert ui.picture.value == first
    ui.operation.value = "flip"
    ui.apply.click()
    ui.reset.click()
    assert ui.picture.value == first and ui.state.total == 0


def test_start_and_next_view_change_the_picture():
    ui = strides.build()
    seen = {ui.picture.value}
    for name in list(strides.STARTS)[1:]:
        ui.start.value = name
        seen.add(ui.picture.value)
    for target in ("2, 18", "5", "x"):
        ui.target.value = target
        seen.add(ui.picture.value)
    assert len(seen) == len(strides.STARTS) + 3


def test_only_the_controls_of_the_operation_are_shown():
    ui = strides.build()
    for name, used in strides.USES.items():
        ui.operation.value = name
        shown = {
            control
            for control in ("dim", "other", "words", "size", "step")
            if getattr(ui, control).layout.display != "none"
        }
        assert shown == set(used)


@pytest.mark.parametrize(
    "step, words",
    [
        (("view", "5, 2"), "shape '[5, 2]' is invalid for input of size 12"),
        (("view", "three"), "whole numbers"),
        (("slice", 0, "::-1"), "step must be greater than zero"),
        (("slice", 0, "a:b"), "start:stop:step"),
        (("slice", 0, ""), "start:stop:step"),
        (("slice", 0, "1:2:3:4"), "start:stop:step"),
        (("slice", 0, "7"), "out of bounds"),
        (("slice", 2, ":"), "too many indices"),
        (("slice", -3, ":"), "out of range"),
        (("transpose", 0, 2), "Dimension out of range"),
        (("permute", "0, 0"), "duplicate dims"),
        (("expand", "4, 4"), "must match the existing size"),
        (("unfold", 0, 9, 1), "maximum size"),
        (("unfold", 0, 2, 0), "step is 0"),
        (("flip", 5), "Dimension out of range"),
        (("expand", "90, 3, 4"), "room for"),
        (("expand", "9" * 30), ""),
        (("reshape", "1, 1, 1, 3, 4"), "room for"),
        (("expand", "100000000000, 3, 4"), "room for"),
    ],
)
def test_what_fails_leaves_a_message_and_the_state(step, words):
    state = state_of()
    after = strides.apply(state, step)
    assert words in after.message and after.message and after.tensor is state.tensor and after.code == state.code
    assert "✗" in strides.draw(after) and after.message in strides.describe(after)
    inside(picture(strides.draw(after)))
    assert strides.apply(after, ("flip", 0)).message == ""


def test_a_failed_step_keeps_what_was_typed():
    ui = strides.build()
    ui.operation.value = "view"
    ui.words.value = "5, 2"
    ui.apply.click()
    assert ui.words.value == "5, 2" and "invalid" in ui.picture.value


def test_a_copy_shows_the_new_storage_dotted_and_the_old_one_left_behind():
    state = state_of("torch.arange(12).view(3, 4)", ("transpose", 0, 1), ("contiguous",))
    root = picture(strides.draw(state))
    assert state.copied == 96 and state.total == 96
    assert len(cells(root, "fresh")) == 24 and len(cells(root, "slot")) == 12
    assert "left behind" in strides.draw(state)
    words = {kind: [cell[-1].text for cell in cells(root, kind)] for kind in ("slot", "fresh")}
    assert words["slot"] == [str(value) for value in range(12)]
    assert words["fresh"] == [str(value) for value in state.tensor.flatten().tolist()] * 2
    later = strides.apply(state, ("flip", 0))
    assert later.copied == 96 and later.total == 192
    assert "left behind" not in strides.draw(strides.apply(later, ("slice", 0, "1:")))


def test_slots_that_are_not_read_are_hatched():
    root = picture(strides.draw(state_of("torch.arange(12).view(3, 4)", ("slice", 1, "::2"))))
    assert [int(node.get("class").split("k")[-1]) for node in cells(root, "idle")] == [1, 3, 5, 7, 9, 11]
    assert all(any("hatch" == part.get("class") for part in node) for node in cells(root, "idle"))


def random_step(rng, tensor):
    dims = tensor.dim()
    numbers = [d for d in (1, 2, 3, 4, 6, 12, -1) if d]
    shape = lambda: ", ".join(str(rng.choice(numbers)) for _ in range(rng.randint(0, 4)))  # noqa: E731
    name = rng.choice(list(strides.USES))
    dim = lambda: rng.randint(-dims - 1, dims)  # noqa: E731
    order = list(range(dims))
    rng.shuffle(order)
    return (
        name,
        *{
            "transpose": lambda: (dim(), dim()),
            "permute": lambda: (", ".join(map(str, order)),),
            "flip": lambda: (dim(),),
            "contiguous": tuple,
            "slice": lambda: (dim(), rng.choice(["::2", "1:", ":0", "-1", "0", "1::3", "", "5:1", "::0"])),
            "unfold": lambda: (dim(), rng.randint(0, 4), rng.randint(0, 3)),
            "expand": lambda: (
                ", ".join(
                    map(
                        str,
                        [
                            *([rng.randint(1, 3)] if rng.random() < 0.5 else []),
                            *(3 if size == 1 else size for size in tensor.shape),
                        ],
                    )
                ),
            ),
            "view": lambda: (shape(),),
            "reshape": lambda: (shape(),),
        }[name](),
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_sequences_draw_what_torch_holds(seed):
    rng = random.Random(seed)
    code = rng.choice(list(strides.STARTS.values()))
    state, done = state_of(code), 0
    for _ in range(14):
        state = strides.apply(state, random_step(rng, state.tensor))
        done += not state.message
        target = rng.choice(["-1", "", "2, -1", "3, 4", "12", "1, -1, 2", "0", "4,3,1", "q"])
        root = picture(strides.draw(state, target))
        inside(root)
        slots = brute_force_slots(state.tensor)
        assert drawn_slots(root) == slots
        rebuilt = eval(state.code)
        assert torch.equal(rebuilt, state.tensor) and rebuilt.stride() == state.tensor.stride()
        idle = {int(node.get("class").split(" k")[-1]) for node in cells(root, "idle")}
        assert idle == set(range(state.tensor.untyped_storage().nbytes() // state.tensor.element_size())) - set(
            slots.values()
        )
        assert strides.describe(state, target).startswith(state.code)
    assert done > 1


def test_the_reasons_are_there_exactly_when_torch_refuses():
    rng, refused = random.Random(0), 0
    for _ in range(3000):
        shape = [rng.choice([1, 1, 2, 3, 4]) for _ in range(rng.randint(0, 4))]
        steps = [rng.choice([0, 1, 2, 3, 4, 6, 8, 12]) for _ in shape]
        tensor = (
            torch.arange(200).as_strided(shape, steps)
            if rng.random() < 0.5
            else torch.arange(200)[: torch.Size(shape).numel()].view(shape)
        )
        if rng.random() < 0.5:
            tensor = tensor.permute(rng.sample(range(len(shape)), len(shape)))
        left, wanted = tensor.numel(), []
        while left > 1:
            wanted.append(rng.choice([d for d in range(1, left + 1) if left % d == 0]))
            left //= wanted[-1]
        try:
            tensor.view(wanted)
            fits = True
        except RuntimeError:
            fits = False
        assert bool(strides.seams(tensor, torch.Size(wanted))) != fits, (tensor.shape, tensor.stride(), wanted)
        assert strides.verdict(tensor, strides.shape_code(wanted))[0] == fits
        refused += not fits
    assert 300 < refused < 2700


def test_the_reason_names_the_numbers():
    tensor = torch.arange(12).view(3, 4).t()
    assert strides.verdict(tensor, "-1") == (
        False,
        ["dimensions 0 and 1 cannot be merged: stride[0] = 1, but shape[1] × stride[1] = 3 × 4 = 12"],
    )
    assert strides.verdict(tensor, "2, 2, 3") == (True, ["shape (2, 2, 3) with strides (2, 1, 4), nothing is copied"])
    assert "invalid for input of size 12" in strides.verdict(tensor, "5")[1][0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3, 5)[:, 1:4],
        torch.rand(2, 2, requires_grad=True),
        torch.tensor(3.5),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.tensor([1 + 2j, -3e20j]),
        torch.tensor([float("nan"), float("inf")]),
        torch.full((4,), -123456789),
        torch.rand(1, 72),
        torch.rand(24, 3),
    ],
)
def test_your_own_tensor(tensor):
    ui = strides.build(tensor)
    inside(picture(ui.picture.value))
    assert (
        ui.start.value == "your tensor"
        and ui.state.tensor.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    )
    assert drawn_slots(picture(ui.picture.value)) == brute_force_slots(ui.state.tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(80),
        torch.rand(25, 2),
        torch.rand(1, 1, 1, 1, 1),
        torch.rand(100)[:5],
        torch.empty(2, device="meta"),
        torch.eye(2).to_sparse(),
    ],
)
def test_a_tensor_without_room_is_refused_in_a_sentence(tensor):
    with pytest.raises(ValueError, match="cannot draw this tensor"):
        strides.explore_strides(tensor)


def test_one_rule_for_each_slot_lights_it_up():
    svg = strides.draw(state_of("torch.arange(6)", ("unfold", 0, 3, 1)))
    assert [svg.count(f".xp:has(.k{slot}:hover,.k{slot}:focus) .k{slot}{{") for slot in range(7)] == [1] * 6 + [0]
    assert (
        len([node for node in cells(picture(svg)) if "k2" in node.get("class").split()]) == 4
    )  # three elements and their slot


@pytest.mark.parametrize("explorer", [strides.explore_strides, memory_format.explore_memory_format])
def test_the_display_carries_widget_picture_and_text(explorer, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.get_ipython", lambda: InteractiveShell)
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    explorer()
    (bundle,) = shown
    picture(bundle["image/svg+xml"])
    assert "stride" in bundle["text/plain"] and "application/vnd.jupyter.widget-view+json" in bundle


# ---- memory formats


@pytest.mark.parametrize("layout", memory_format.LAYOUTS)
def test_a_walk_visits_the_slots_that_torch_says(layout):
    state = memory_format.State(2, 3, 4, layout)
    x = eval(memory_format.code(state))
    start, last = x.untyped_storage().data_ptr(), layout.startswith("NHWC")
    place = lambda n, c, h, w: (x[(n, h, w, c) if last else (n, c, h, w)].data_ptr() - start) // 4  # noqa: E731
    assert memory_format.steps(x, layout, memory_format.WALKS[0]) == [place(0, c, 1, 2) for c in range(3)]
    assert memory_format.steps(x, layout, memory_format.WALKS[1]) == [place(0, 0, 1, w) for w in range(4)]
    logical = product(*map(range, x.shape))
    assert memory_format.steps(x, layout, memory_format.WALKS[2]) == [
        (x[index].data_ptr() - start) // 4 for index in logical
    ]


def test_the_cost_of_a_walk_is_counted():
    x = torch.arange(64.0)  # torch aligns what it allocates to 64 bytes: 16 slots a line
    assert memory_format.cost(x, [0, 1, 2, 3]) == (3, 1, 1)
    assert memory_format.cost(x, [0, 16, 1, 17, 63]) == (16 + 15 + 16 + 46, 3, 5)


def test_the_three_layouts_hold_the_same_values():
    state = memory_format.State(2, 3, 4)
    tensors = [memory_format.nchw(memory_format.image(state, layout), layout) for layout in memory_format.LAYOUTS]
    assert all(torch.equal(tensors[0], other) for other in tensors[1:])


def test_every_control_changes_the_picture_and_the_picture_is_true(monkeypatch):
    timings = {
        (name, layout): (k + 1.0, k + 1.1, k + 1.2)
        for name in (*memory_format.WALKS, "conv2d")
        for k, layout in enumerate(memory_format.LAYOUTS)
    }
    monkeypatch.setattr(memory_format, "measure", lambda: timings)
    ui = memory_format.build()
    seen = [ui.picture.value]
    for name, value in (
        ("images", 2),
        ("height", 2),
        ("width", 3),
        ("walk", memory_format.WALKS[1]),
        ("walk", memory_format.WALKS[2]),
        ("layout", "NCHW, channels_last"),
        ("layout", "NHWC, permuted by hand"),
        ("height", 4),
        ("width", 4),
    ):
        getattr(ui, name).value = value
        seen.append(ui.picture.value)
    assert "Press Measure" in seen[-1]
    ui.measure.click()
    seen.append(ui.picture.value)
    assert len(set(seen)) == len(seen) and "1.00 (0.91–1.09)" in seen[-1] and ui.measure.description == "Measure"
    for svg in seen:
        inside(picture(svg))
    x = memory_format.image(ui.state)
    tiles = [node for node in cells(picture(seen[-1])) if node.get("aria-label")]
    for node in tiles:
        n, channel, row, column, slot = re.fullmatch(
            r"image (\d), channel (.), row (\d), column (\d): storage slot (\d+)", node.get("aria-label")
        ).groups()
        element = memory_format.nchw(x, ui.state.layout)[int(n), "RGB".index(channel), int(row), int(column)]
        assert (element.data_ptr() - x.data_ptr()) // 4 == int(slot)
    assert len(tiles) == x.numel()


def test_all_pictures_of_memory_formats_fit():
    for images, height, width, layout, walk in product(
        (1, 2), (2, 3, 4), (2, 3, 4), memory_format.LAYOUTS, memory_format.WALKS
    ):
        inside(picture(memory_format.draw(memory_format.State(images, height, width, layout, walk))))


def test_measuring_gives_quartiles_for_everything_and_leaves_the_random_numbers_alone():
    state = torch.get_rng_state()
    timings = memory_format.measure(runs=3)
    assert set(timings) == set(product((*memory_format.WALKS, "conv2d"), memory_format.LAYOUTS))
    assert all(0 < low <= middle <= high for low, middle, high in timings.values())
    assert torch.equal(state, torch.get_rng_state())


def test_the_conclusion_is_no_wider_than_the_measurement():
    first, second, third = memory_format.LAYOUTS
    apart = {("w", first): (1.0, 1.1, 1.2), ("w", second): (2.0, 2.2, 2.4), ("w", third): (1.0, 1.15, 1.2)}
    said = memory_format.conclusion(apart, "w", "it")
    assert said.endswith(f"it takes at least 1.7 times as long in {second} as in {first}.")
    close = {**apart, ("w", second): (1.15, 1.3, 1.4)}
    assert "no difference" in memory_format.conclusion(close, "w", "it")
