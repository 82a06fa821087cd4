"""Finding the model in a form, and only that."""

from __future__ import annotations

import pytest

from extproc.request.multipart import MOST_NAME_BYTES, MOST_PARTS, NotAForm, boundary_of, find_model, model_part


def part(disposition: str, value: bytes = b"x") -> bytes:
    """One part of a form whose boundary is `b`."""
    return b"--b\r\nContent-Disposition: " + disposition.encode() + b"\r\n\r\n" + value + b"\r\n"


MODEL = part('form-data; name="model"', b"sim")
FILE = part('form-data; name="file"; filename="model"', b"RIFF\0\r\n\r\n--c\r\n--")
END = b"--b--\r\n"


@pytest.mark.parametrize(
    "body",
    [
        MODEL + END,
        FILE + MODEL + END,
        b"preamble\r\n" + MODEL + FILE + END,
        part("form-data; name=model", b"sim") + END,
        part('Form-Data; filename="f"; name="model"', b"sim") + END,
        b'--b\r\nContent-Type: text/plain\r\ncontent-disposition:form-data;name="model"\r\n\r\nsim\r\n--b--',
    ],
)
def test_the_models_value_is_found(body: bytes) -> None:
    """Wherever it stands and however its header is spelled."""
    found = find_model(body, b"--b")
    assert found is not None
    assert body[slice(*found)] == b"sim"


@pytest.mark.parametrize(
    "body",
    [END, FILE + END, part('form-data; name="models"') + END, part('form-data; filename="model"') + END],
)
def test_a_form_may_have_no_model(body: bytes) -> None:
    """None, not a guess from a similar name."""
    assert find_model(body, b"--b") is None


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{}", "not in the body"),
        (b"--b\r\n" + b"x: y\r\n" * 2_000, "headers of a part"),
        (b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nsim', "does not end"),
        (part("form-data; name=x") * (MOST_PARTS + 1) + END, "first 64 parts"),
        (part("form-data; name=model", b"m" * (MOST_NAME_BYTES + 1)) + END, "longer than"),
    ],
)
def test_what_is_no_form_or_costs_too_much_is_said(body: bytes, why: str) -> None:
    """Every bound has its words."""
    with pytest.raises(NotAForm, match=why):
        find_model(body, b"--b")


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=b", b"--b"),
        ('Multipart/Form-Data; charset=utf-8; Boundary="a b"', b"--a b"),
    ],
)
def test_the_boundary_is_read(content_type: str, boundary: bytes) -> None:
    """Bare or quoted."""
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize("content_type", ["multipart/form-data", "multipart/form-data; boundary=", 'x; boundary=""'])
def test_no_boundary_is_said(content_type: str) -> None:
    """The body cannot be read without."""
    with pytest.raises(NotAForm, match="no boundary"):
        boundary_of(content_type)


def test_a_part_can_be_put_in_front() -> None:
    """And is found there."""
    body = model_part(b"--b", "new") + FILE + END
    found = find_model(body, b"--b")
    assert found is not None
    assert body[slice(*found)] == b"new"
