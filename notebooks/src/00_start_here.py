# %% [markdown]
# # 00 · Start here
#
# After this lesson you know how the course works, because you have done each of its moves once, and you know what this machine can show you.
#
# 15 minutes. It needs nothing but a little Python.
#
# A notebook is a list of cells. Click into the next one and press **Shift+Enter**: it runs, and the cursor moves on. Do the same with each cell that follows.

# %% tags=["parameters"]
DEVICE = "auto"
SEED = 0
QUICK = True

# %%
import sys

import torch

from course_utils import check, course_map, explore_strides, hint, predict
from course_utils import progress, raises, solution, start, table

lesson = start("00_start_here", DEVICE, SEED, QUICK)

# %% [markdown]
# The line says which device the lesson uses, which versions are installed, and how far you are. `DEVICE`, `SEED` and `QUICK` above are the lesson's settings (`QUICK` keeps sizes small): change one, for instance `SEED`, and run from there again.
#
# ## Nothing on trust
#
# This course states no fact that it does not show. A cell that shows one measures, prints, and *asserts*: were the fact false on your machine and your version of PyTorch, the cell would fail.

# %% tags=["nbval-check-output"]
numbers = torch.tensor([1, 2, 3])
print(numbers.dtype, "/ 2 gives", (numbers / 2).dtype)
assert (numbers / 2).dtype == torch.float32

# %% [markdown]
# Try it: change `torch.float32` to `torch.int64` in the cell, run it, read the error, and change it back.
#
# Sometimes an error *is* the fact. Then it is caught and its message shown, and the cell would fail if nothing were raised:

# %% tags=["nbval-check-output"]
with raises(RuntimeError):
    torch.ones(2) + torch.ones(3)

# %% [markdown]
# Read it from the end: *non-singleton dimension 0* says where (a dimension whose size is not 1), *size of tensor a (2)* and *b (3)* say what met there.
#
# ## You act first
#
# Before the course shows you something, it asks what you expect. Commit to an answer, even if you have to guess: a wrong guess is remembered better than a right explanation. The key is not written
# anywhere; it is what PyTorch does at that moment. Press one of the answers.

# %%
predict(
    "`x = torch.ones(3)`, then `y = x`, then `y += 1`. What is `x` now?",
    run=lambda: (lambda x: [x, x.__iadd__(1)][0])(torch.ones(3)).tolist(),
    options={
        "[1.0, 1.0, 1.0]: only y has changed": lambda x: x == [1.0, 1.0, 1.0],
        "[2.0, 2.0, 2.0]: y is another name for x": lambda x: x == [2.0, 2.0, 2.0],
    },
)

# %% tags=["nbval-check-output"]
x = torch.ones(3)
y = x
y += 1
print(x.tolist())
assert x is y

# %% [markdown]
# ## Exercises
#
# An exercise is a function with its body missing. The cell below it checks what you write, on several cases, and says of a wrong answer what went in, what came out, what was expected, and, where it knows it, the thought
# behind the mistake. Do this one wrongly first:
#
# 1. Run the check as it stands. It says that nothing has been attempted.
# 2. Replace the `...` by `return sum(shape)`, run both cells, and read what the check says.
# 3. Ask for a hint: remove the `#` in front of `hint` and run the cell again.
# 4. Do it right.

# %% [markdown]
# ### Exercise · How many elements? (two minutes)


# %% tags=["exercise"]
def total_elements(shape):
    """Number of elements of a tensor of this shape.

    >>> total_elements((2, 3))
    6
    """
    ...


# %%
check(total_elements)
# hint(total_elements)
# solution(total_elements)

# %% [markdown]
# You can always go on without solving an exercise: nothing later depends on it. What you solve is remembered, here and for the command `python -m course_utils progress`:

# %%
progress()

# %% [markdown]
# ## Explorers
#
# Some things are best understood by trying them by hand. An explorer shows real tensors and answers at once. This one holds a tensor of two rows and three columns, and the strip of memory below it. Press *transpose*, then *Apply*:
# the rows and columns change places, and the strip stays as it is. Then *contiguous* and *Apply*, and look at the strip again. Lesson 01 explains what you have seen.

# %%
explore_strides(torch.arange(6).view(2, 3))

# %% [markdown]
# All controls work with the mouse and with the keyboard: Tab goes on, Space or Enter presses, the arrow keys change a number.
#
# ## This machine
#
# What it has, and what will hurt in which lesson. A `!` marks what to fix beforehand.

# %%
from course_utils.engine.environment import preflight

table(
    ("", "on this machine"),
    [("!" if finding.hurts else "", finding.text) for finding in preflight()],
)
if torch.cuda.is_available():
    print("Cells about GPUs run here, on", torch.cuda.get_device_name())
else:
    print(
        "No CUDA device: cells about GPUs say what they would do",
        "and show as much of it as a CPU can.",
    )

# %% [markdown]
# The course runs in an environment of its own, with versions that were tested together. The advice is old: *a virtual environment for each project, and check version and device first*. The command that brought you here did the first; this cell does the second:

# %% tags=["claim-H01"]
from course_utils.engine.environment import REQUIREMENTS, satisfied

print(
    "environment:",
    "a virtual environment"
    if sys.prefix != sys.base_prefix
    else "the interpreter's own (conda, a container or a hosted notebook)",
)
print(
    "torch",
    torch.__version__,
    "on Python",
    sys.version.split()[0],
    "  default device:",
    torch.get_default_device(),
)
assert satisfied(REQUIREMENTS), (
    "installed versions are outside the tested ranges: python -m course_utils lab mends that"
)
assert torch.ones(1, device=lesson.device).device.type == lesson.device.type

# %% [markdown]
# ## The course

# %%
course_map()

# %% [markdown]
# The lessons build on each other in this order; each says at its top what it needs.
#
# Your copies of the notebooks are in the folder `work`. An update of the course never overwrites one that holds your answers. In a terminal, in the course's folder:
#
# | command | what it does |
# | --- | --- |
# | `python -m course_utils lab` | opens JupyterLab on your copies |
# | `python -m course_utils progress` | what you have solved |
# | `python -m course_utils reset 01` | a fresh copy of lesson 01; the old one stays beside it under a dated name |
# | `python -m course_utils run` | runs every lesson from top to bottom without JupyterLab |
# | `python -m course_utils test` | proves the whole course on this machine |
#
# **In a classroom.** Each learner has a copy of the folder; a machine without a network installs from a folder of packages (pip's `find-links`). Work in pairs at the predictions: say your guess aloud before you press. A teacher collects the notebooks from
# everyone's `work` in one folder and runs `python -m course_utils grade FOLDER`.
#
# **All in one go.** *Run → Run All Cells* runs this notebook as it is; unsolved exercises say so and stop nothing.
#
# Open `01_tensors.ipynb` in the list of files on the left.
