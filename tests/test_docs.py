"""Pages: their links lead somewhere, no line is too wide to read as text, and the family that one of them adds can be trained."""

import re
from pathlib import Path

import numpy as np
import pytest
from test_objectives import DECAY, pair, scored, texts

from reanchor_jax.training import families
from reanchor_jax.training.losses import cross_entropy

_ROOT = Path(__file__).parents[1]
_PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(str(path.relative_to(_ROOT)) for path in _ROOT.glob("docs/*.md"))]


@pytest.mark.parametrize("page", _PAGES)
def test_links_between_pages_lead_to_files(page):
    text = (_ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("http", "#"))]
    assert all(((_ROOT / page).parent / link).exists() for link in links), links


def test_every_page_is_linked_from_the_readme():
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"]({page})" in text for page in _PAGES if page.startswith("docs/"))


def test_the_family_that_a_page_adds_has_the_loss_it_says(monkeypatch):
    (source,) = re.findall(r"^```python\n(.*?)^```", (_ROOT / "docs" / "families.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    module = {}
    exec(compile(source, "families.md", "exec"), module)
    monkeypatch.setitem(families.FAMILIES, "paged", module["FAMILY"])
    models = pair("dflash")
    blocks, (loss, logits) = scored(models.drafter, models.target, np.float32(0.5), family="paged")
    each = np.asarray(cross_entropy(logits, blocks.tokens[:, :, 1:]))
    weights = np.exp(-np.arange(each.shape[2]) / DECAY) * np.asarray(blocks.is_inside)
    assert texts().shape[0] == each.shape[0]
    np.testing.assert_allclose(loss, (weights * each).sum() / weights.sum(), rtol=1e-5)
