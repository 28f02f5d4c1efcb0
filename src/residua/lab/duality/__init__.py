"""The residual stream duality (arXiv 2603.16039), run: one operator, two axes, and what the equality needs."""

from residua.lab.duality.models import Subject as Subject
from residua.lab.duality.models import from_run as from_run
from residua.lab.duality.models import random_subject as random_subject
from residua.lab.duality.models import subject as subject
from residua.lab.duality.models import trained_subjects as trained_subjects
from residua.lab.duality.report import as_markdown as as_markdown
from residua.lab.duality.report import examine as examine
