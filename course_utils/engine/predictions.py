"""predict: the learner commits to an answer before it is shown; raises: an error on purpose, read and asserted."""
import contextlib
import os
import textwrap

from course_utils.engine import display, session
from course_utils.engine.compare import brief
from course_utils.engine.progress import record_prediction

LETTERS = "ABCDEFGH"


def settle(run, options):
    """Run it and say which option holds. Returns (letter, what came).

    `options` maps a label to a predicate on what `run()` returned, or on the exception that it raised. The key is thus what PyTorch does
    here and now. Raises AssertionError unless exactly one option holds.
    """
    try:
        came = run()
    except Exception as error:
        came = error
    true = [letter for letter, holds in zip(LETTERS, options.values()) if _holds(holds, came)]
    if len(true) != 1:
        raise AssertionError(f"{len(true)} options hold ({', '.join(true) or 'none'}); what came is {_shown(came)}")
    return true[0], came


def _holds(predicate, came):
    try:
        return bool(predicate(came))
    except Exception:  # a predicate on a number does not fit an exception: then it does not hold
        return False


def _shown(came):
    if isinstance(came, Exception):
        return f"{type(came).__name__}: {str(came).splitlines()[0][:200] if str(came) else ''}"
    return brief(came)


def predict(question, run, options):
    """Ask, offer the options as buttons, and show what happened once one is pressed. See `settle` for `run` and `options`.

    Outside a notebook, and in a stored one, question and options are shown as text; the next cell answers.
    """
    labels = list(options)
    text = "\n".join([f"Predict: {question}", *(f"  {letter}  {label}" for letter, label in zip(LETTERS, labels))])
    try:
        right, came = settle(run, options)
    except AssertionError as error:
        if os.environ.get("COURSE_STRICT") == "1" or os.environ.get("CI"):
            raise
        display.card("note", question, [("text", f"On this machine and version the prepared answers do not fit: {error}. "
                                                 "The next cell shows what happens here.")])
        return
    display.show(text, svg=_static(question, labels), widget=_widget(question, labels, right, came))


def _static(question, labels):
    lines = [("bold", line) for line in textwrap.wrap(question.replace("`", ""), 100)]
    for letter, label in zip(LETTERS, labels):
        wrapped = textwrap.wrap(label.replace("`", ""), 96)
        lines += [(letter if i == 0 else "", line) for i, line in enumerate(wrapped)]
    body = f'<rect x="1" y="1" width="3" height="{22 * len(lines) + 12}" fill="{display.ROLES["view"]}"/>'
    for i, (letter, line) in enumerate(lines):
        y = 22 * i + 20
        if letter == "bold":
            body += f'<text x="16" y="{y}" font-weight="600">{display.escape(line)}</text>'
        else:
            body += f'<text class="faint mono" x="20" y="{y}">{letter}</text><text x="44" y="{y}">{display.escape(line)}</text>'
    return display.svg_document(900, 22 * len(lines) + 14, body, "Predict: " + question)


def _widget(question, labels, right, came):
    import ipywidgets

    style = ipywidgets.HTML(
        f"<style>.course-predict{{border-left:4px solid {display.ROLES['view']};padding:2px 0 2px 12px;overflow:visible}}"
        ".course-option{height:auto;min-height:32px;text-align:left;white-space:normal;line-height:1.45;padding:5px 12px;border-radius:4px}"
        f".course-option.chosen{{outline:2px solid {display.ROLES['storage']}}}"
        f".course-predict .widget-html-content{{white-space:normal;line-height:1.5;font-size:14px;color:{display.INK}}}</style>"
        f"<b>{display.inline(question)}</b>"
    )
    buttons = [
        ipywidgets.Button(
            description=f"{letter} · {label}".replace("`", ""),
            tooltip=f"answer {letter}",
            layout={"width": "auto", "max_width": "860px"},
        )
        for letter, label in zip(LETTERS, labels)
    ]
    answer = ipywidgets.HTML()

    def choose(button):
        letter = button.description[0]
        for b in buttons:
            b.remove_class("chosen")
        button.add_class("chosen")
        answer.value = verdict(letter, right, came)
        record_prediction(session.current_lesson(), question, letter == right)

    for button in buttons:
        button.add_class("course-option")
        button.on_click(choose)
    box = ipywidgets.VBox([style, *buttons, answer])
    box.add_class("course-predict")
    return box


def verdict(letter, right, came):
    """What is said to the learner who chose `letter`, as HTML."""
    mark, colour = display.STATES["right" if letter == right else "wrong"]
    said = f"{letter} is what happens." if letter == right else f"Not {letter}: {right} is what happens."
    return (
        f'<span role="status"><span style="color:{colour};font-weight:700">{mark}</span> {said} '
        f'<span style="color:{display.FAINT}">It gave</span> <code>{display.escape(_shown(came))}</code></span>'
    )


@contextlib.contextmanager
def raises(expected):
    """Run a block that must raise `expected`, and show the message: the error is part of the lesson. Fails if nothing is raised."""
    try:
        yield
    except expected as error:
        lines = f"{type(error).__name__}: {error}".splitlines()[:6]
        print("\n".join(textwrap.fill(line, 96) for line in lines))
        return
    raise AssertionError(f"nothing was raised; {expected.__name__} was expected")
