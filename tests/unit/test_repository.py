"""Rules of this repository that no tool checks."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ["deployment", "actors", "model", "kernels", "placement", "benchmarks"]


def test_importing_a_package_imports_nothing_else():
    initializers = [path for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")]
    assert len(initializers) >= len(PACKAGES)
    assert [path for path in initializers if path.read_bytes()] == []


def test_serve_can_read_the_annotation_of_the_application_builder():
    # With postponed annotations Ray Serve 2.60 sees a string instead of EngineConfig and passes `args` unchecked.
    for path in (ROOT / "deployment").rglob("*.py"):
        tree = ast.parse(path.read_text())
        builders = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "build"]
        postponed = [
            node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        ]
        assert not (builders and postponed), path


def test_the_readme_lists_every_module_and_no_other():
    sections = (ROOT / "README.md").read_text().split("**`")[1:]
    listed = {
        f"{section.split('/', 1)[0]}/{line.split('`')[1]}"
        for section in sections
        for line in section.splitlines()
        if line.startswith("| `")
    }
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert listed == modules
