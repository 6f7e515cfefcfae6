"""The explorers of lesson 04 without a browser: what they draw and say is held against torch, called here anew."""
import math
import random
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from course_utils.explorers import floats, loss_scale
from course_utils.explorers.loss_scale import STEPS
from course_utils.toolkit.precision import FORMATS, float_bits, from_bits

DTYPES = {name: f.dtype for name, f in FORMATS.items() if f.dtype is not None}


def picture(svg):
    root = ElementTree.fromstring(svg)
    width, height = map(float, root.get("viewBox").split()[2:])
    assert width <= 900 and 'id="' not in svg and "<pattern" not in svg
    for node in root.iter():
        if node.tag.endswith("text"):
            x, y, kinds = float(node.get("x")), float(node.get("y")), set(node.get("class").split())
            assert 0 <= x and 0 <= y <= height, node.text
            letter = 7.2 if "small" in kinds else 9.1 if "mono" in kinds else 8.2
            if not {"mid", "end"} & kinds:
                assert x + letter * len(node.text or "") <= width + 12, node.text
    return root


# ---- floats

SOME = (0.1, -1.0, 0.0, -0.0, 65504.0, 65520.0, 1e-7, 3e-8, 2.0**-126, 5e-324, 448.0, 460.0, 1e9, 3.4e38, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("number", SOME)
def test_each_format_holds_what_torch_makes_of_the_number(number):
    state = floats.State(number)
    root = picture(floats.draw(state))
    for name, dtype in DTYPES.items():
        value = torch.tensor(number, dtype=torch.float64).float().to(dtype).float().item()
        held = floats.held(state, name).value
        assert held == value or math.isnan(held) and math.isnan(value), name
    said = [node.text for node in root.iter() if node.tag.endswith("text")]
    assert sum(text in ("0", "1") for text in said) == 32 + 19 + 16 + 16 + 8 + 8, "every bit is drawn"


def test_flipping_a_bit_twice_gives_the_number_back_and_each_flip_changes_it():
    chance = random.Random(0)
    for name in FORMATS:
        for _ in range(40):
            begin = floats.State(chance.uniform(-2, 2) * 2.0 ** chance.randint(-9, 9), name)
            begin = floats.State(floats.held(begin, name).value, name)
            place = chance.randrange(len(floats._digits(floats.held(begin, name))))
            once = floats.flip(begin, place)
            twice = floats.flip(once, place)
            assert once.number != begin.number and twice.number == begin.number, (name, place)
            picture(floats.draw(once))


def test_flipped_bits_of_a_nan_stay_as_they_were_flipped():
    state = floats.State(math.inf, "fp16")
    state = floats.flip(floats.flip(state, 15), 12)
    assert state.bits == "0111110000001001" and math.isnan(state.number)
    assert floats.flip(floats.flip(state, 15), 12).number == math.inf


@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype.itemsize > 1])
def test_neighbours_are_those_of_nextafter(name):
    dtype = DTYPES[name]
    for number in (0.0, 1.0, -1.0, 0.1, -2048.0, FORMATS[name].max, FORMATS[name].smallest, -FORMATS[name].smallest):
        number = torch.tensor(number, dtype=dtype)
        for way in (1, -1):
            wanted = torch.nextafter(number, torch.tensor(way * math.inf, dtype=dtype)).item()
            assert floats.neighbour(floats.State(number.item(), name), way).number == wanted, (number, way)


@pytest.mark.parametrize("name", FORMATS)
def test_at_its_ends_a_format_has_no_next_number(name):
    state = floats.State(FORMATS[name].max, name)
    for _ in range(3):
        state = floats.neighbour(state, 1)
        assert not math.isnan(state.number)
    assert state.number == (FORMATS[name].max if FORMATS[name].finite else math.inf)
    nan = floats.State(math.nan, name)
    assert floats.neighbour(nan, 1) is nan


def test_what_is_lost_is_said():
    said = {name: floats.loss(floats.State(1e-5), name)[1] for name in FORMATS}
    assert "subnormal" in said["fp16"] and "subnormal" not in said["bf16"] and "too small" in said["float8_e4m3fn"]
    assert floats.loss(floats.State(0.5), "fp16") == ("", "exact")
    assert floats.loss(floats.State(1e6), "fp16")[0] == "✗" and "ends at 65504" in floats.loss(floats.State(1e6), "fp16")[1]
    assert "ends at 448" in floats.loss(floats.State(1e6), "float8_e4m3fn")[1]
    assert floats.loss(floats.State(1e-9), "fp16") == ("✗", "too small: begins at 6e-08")
    off = floats.loss(floats.State(0.1), "bf16")[1]
    assert off == "off by 0.098 %" and math.isclose(float_bits(0.1, "bf16").value / 0.1 - 1, 0.00098, rel_tol=0.01)
    assert "no infinity" in floats.loss(floats.State(math.inf), "float8_e4m3fn")[1]


READ = [("0.1", 0.1), (" 2**-14 ", 2.0**-14), ("1/3", 1 / 3), ("-inf", -math.inf), ("0e5", 0.0), ("1/inf", 0.0)]


@pytest.mark.parametrize("typed, number", READ)
def test_numbers_are_read(typed, number):
    assert floats.read(typed) == number


NO_NUMBER, TOO_LARGE, TOO_SMALL = "no number that can be read", "too large: Python's own numbers end", "too small: Python's own"
NOT_READ = {"": "nothing to read", "abc": NO_NUMBER, "1/0": NO_NUMBER, "2**": NO_NUMBER, "9**9**9": NO_NUMBER, "(-8)**0.5": NO_NUMBER,
            "__import__('os')": NO_NUMBER, "<b>" * 99: NO_NUMBER, "10**400": TOO_LARGE, "1e999": TOO_LARGE, "-9" + "9" * 400: TOO_LARGE,
            "1e-999": TOO_SMALL, "2**-2000": TOO_SMALL}


@pytest.mark.parametrize("typed", NOT_READ)
def test_what_is_no_number_is_said_and_nothing_is_lost(typed):
    with pytest.raises(ValueError, match=NOT_READ[typed]):
        floats.read(typed)
    ui = floats.build()
    ui.typed.value = "x"
    ui.typed.value = typed
    said = [node.text for node in picture(ui.picture.value).iter() if node.get("class") == "bad strong"]
    assert ui.state.number == 0.1 and len(said) == 1 and re.search(NOT_READ[typed], said[0])
    ui.typed.value = "0.25"
    assert ui.state.number == 0.25 and "bad strong" not in ui.picture.value


@pytest.mark.parametrize("name", FORMATS)
def test_the_formula_gives_the_value(name):
    f, chance = FORMATS[name], random.Random(1)
    width = 1 + f.exponent_bits + f.mantissa_bits
    for pattern in range(256) if width == 8 else [chance.getrandbits(width) for _ in range(300)] + list(range(1, 9)):
        bits = from_bits(f"{pattern:0{width}b}", f)
        made, _, value = floats.formula(bits).partition(" = ")
        if math.isfinite(bits.value):
            assert eval(made.replace("−", "-").replace("×", "*").replace("^", "**")) == bits.value, made
            assert ("no 1 leads" in value) == (bits.kind in ("subnormal", "zero"))
        else:
            assert ("infinity" in made) == (bits.kind == "infinite") and ("no number" in made) == (bits.kind == "nan")


@pytest.mark.parametrize("name", FORMATS)
def test_how_far_the_next_one_is_holds_at_the_ends_too(name):
    largest = floats.State(FORMATS[name].max, name)
    before = floats.neighbour(largest, -1)
    assert floats.apart(floats.held(largest, name)) == f"the largest; last step {largest.number - before.number:.3g}"
    assert floats.apart(floats.held(before, name)) == f"next one {largest.number - before.number:.3g} away"
    assert floats.apart(from_bits("1" * len(floats._digits(floats.held(before, name))), name)) == "not between any numbers"


def test_a_format_that_makes_nan_of_what_is_too_large_says_so(monkeypatch):
    """As PyTorch did before 2.12 in float8_e4m3fn."""
    monkeypatch.setattr(floats, "float_bits", lambda number, name: from_bits("01111111", "float8_e4m3fn"))
    assert floats.loss(floats.State(1e6, "float8_e4m3fn"), "float8_e4m3fn") == ("✗", "too large: ends at 448")


def test_the_words_say_all_that_the_picture_shows():
    words = floats.describe(floats.State(0.1)).splitlines()
    assert words[4].startswith("fp16: sign 0, exponent 01011, mantissa 1001100110 is 0.0999755859375; next one 6.1e-05 away; off by 0.02")
    assert words[-1] == "fp16: (1 + 614/1024) × 2^(11 − 15) = 0.0999755859375"


def test_every_control_of_floats_moves_the_picture():
    ui = floats.build()
    for act in (ui.up.click, ui.up.click, ui.down.click, ui.double.click, ui.half.click, ui.bits[3].click, ui.bits[0].click):
        before = ui.picture.value
        act()
        assert ui.picture.value != before
    for name, bits in zip(floats.NAMES, (32, 19, 16, 16, 8, 8)):
        ui.format.value = name
        assert len(ui.box.children[1].children) == bits
        assert "".join(b.description for b in ui.box.children[1].children) == floats._digits(floats.held(ui.state, floats.NAMES[name]))
    assert "sign" in ui.bits[0].tooltip and "exponent" in ui.bits[1].tooltip


# ---- loss_scale


def test_the_histogram_counts_every_gradient_once():
    values = loss_scale.gradients()
    shares = loss_scale.histogram()
    assert sum(shares.values()) == pytest.approx(1)
    for power in (-12, -20):
        wanted = ((values.abs() >= 2.0**power) & (values.abs() < 2.0 ** (power + 1))).float().mean().item()
        assert shares[power] == pytest.approx(wanted, abs=1e-6)


def test_making_the_gradients_leaves_the_random_numbers():
    loss_scale.gradients.cache_clear()
    torch.manual_seed(5)
    first = torch.rand(1)
    torch.manual_seed(5)
    loss_scale.gradients()
    assert torch.equal(torch.rand(1), first)


@pytest.mark.parametrize("power", [0, 8, 16, 24, 32, 40])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_the_shares_are_those_of_a_cast(power, name):
    state = loss_scale.State(power, name)
    scaled = (loss_scale.gradients().double() * 2.0**power).float()
    cast = scaled.to(DTYPES[name])
    under, fewer, over = loss_scale.shares(state)
    size = cast.double().abs()
    assert fewer == pytest.approx(((size < FORMATS[name].smallest_normal) & (size > 0)).double().mean().item(), abs=1e-4)
    assert under == pytest.approx((cast == 0).double().mean().item(), abs=1e-9)
    assert over == pytest.approx(cast.isinf().double().mean().item(), abs=1e-4)
    root = picture(loss_scale.draw(state))
    bars = [node for node in root.iter() if (node.get("class") or "").startswith("bar")]
    assert len(bars) == len(loss_scale.histogram()), "wherever the scale moves them, all are drawn"
    assert all(loss_scale.LEFT <= float(bar.get("x")) < loss_scale.RIGHT for bar in bars)
    assert under + over > 0 or not [bar for bar in bars if bar.get("class") == "bar lost"]
    assert (f"{100 * under:.2f} % become 0" in loss_scale.findings(state)[0]) == (under > 5e-5)
    assert (f"{100 * over:.2f} % are too large" in loss_scale.findings(state)[0]) == (over > 5e-5)


def by_hand(start, interval, backoff, planted):
    """The scaler's arithmetic, with an overflow where the largest gradient times the scale is beyond fp16."""
    largest, scale, good, steps = loss_scale.gradients().abs().max().item(), 2.0**start, 0, []
    for step in range(STEPS):
        skip = step in planted or largest * scale >= 65520
        steps.append((scale, skip))
        good = 0 if skip else good + 1
        if skip:
            scale *= backoff
        elif good == interval:
            scale, good = 2 * scale, 0
    return steps


PLAYED = [(16, 6, 0.5, (20,)), (30, 3, 0.25, ()), (0, 1, 0.5, (1, 2, 3)), (16, 60, 0.25, tuple(range(40))), (24, 2, 0.75, (5, 59))]


@pytest.mark.parametrize("start, interval, backoff, planted", PLAYED)
def test_the_trajectory_is_the_scalers(start, interval, backoff, planted):
    wanted = by_hand(start, interval, backoff, planted)
    played = loss_scale.play(start, interval, backoff, planted)
    assert [skip for _, skip in played] == [skip for _, skip in wanted]
    assert [scale for scale, _ in played] == pytest.approx([scale for scale, _ in wanted], rel=1e-5)  # the scaler's is float32
    root = picture(loss_scale.draw(loss_scale.State(0, "fp16", start, interval, backoff, planted)))
    crosses, rings = (sum(node.get("class") == css for node in root.iter()) for css in ("cross", "ring"))
    assert crosses == 2 + sum(skip for _, skip in wanted) and rings == 1 + len(planted), "two crosses and a ring are the legend's"


def test_above_the_limit_the_largest_gradient_overflows():
    largest = loss_scale.gradients().abs().max()
    below, above = (largest * 2.0 ** (loss_scale.limit() + by) for by in (-1e-4, 1e-4))
    assert below.half().isfinite() and above.half().isinf()


def test_steps_are_read_and_what_is_none_is_said():
    assert loss_scale.read("5 12, 13;5") == (5, 12, 13) and loss_scale.read(" ") == ()
    for typed in ("x", "60", "-1", "5.5", "1e999", "99999999999", "7 " * 99 + "x"):
        with pytest.raises(ValueError, match="no list of steps"):
            loss_scale.read(typed)
    ui = loss_scale.build()
    ui.planted.value = "seven " * 40
    assert ui.state.planted == (20,) and "no list of steps" in ui.picture.value
    picture(ui.picture.value)
    ui.planted.value = "7"
    assert ui.state.planted == (7,) and "no list" not in ui.picture.value


def test_every_control_of_the_loss_scale_moves_the_picture():
    ui = loss_scale.build()
    for name, value in (("power", 9), ("start", 20), ("interval", 2), ("backoff", 0.25), ("planted", "3 4"), ("format", "bf16")):
        before = ui.picture.value
        getattr(ui, name).value = value
        assert ui.picture.value != before, name
    assert "bf16" in ui.picture.value


@pytest.mark.parametrize("module", [floats, loss_scale])
def test_the_static_picture_and_its_words_are_there(module, capsys):
    ui = module.build()
    words = module.describe(ui.state)
    assert re.search(r'aria-label="[^"]{80,}', ui.picture.value)
    {floats: floats.explore_float, loss_scale: loss_scale.explore_loss_scale}[module]()
    assert capsys.readouterr().out.strip() == words
