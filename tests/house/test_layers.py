"""Layers of the library: each imports only those below it, as docs/how_it_works.md lists them."""

from __future__ import annotations

from checkers import ROOT, all_files, folder_import_complaints, layer_complaints, library_files, module_name


def test_nobody_imports_a_folder_by_its_own_name() -> None:
    complaints = [
        f"{file.relative_to(ROOT)}:{complaint}"
        for file in all_files()
        for complaint in folder_import_complaints(file.read_text())
    ]
    assert not complaints, "\n".join(complaints)


def test_imports_go_downward() -> None:
    complaints = [
        f"{file.relative_to(ROOT)}:{complaint}"
        for file in library_files()
        for complaint in layer_complaints(file.read_text(), module_name(file), file.name == "__init__.py")
    ]
    assert not complaints, "\n".join(complaints)
