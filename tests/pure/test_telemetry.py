"""What a member says with a combine arrives as it was said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.core.cadence import CheckpointReport
from unisono.core.events import Seconds
from unisono.core.telemetry import NOT_COMPARED, TELEMETRY_BYTES, Compared, StepTelemetry

counts = st.integers(-1, 2**63 - 1)
digests = st.integers(0, 2**64 - 1)
seconds = st.floats(0, 1e9)
reports = st.builds(
    CheckpointReport, st.booleans(), counts, st.integers(0, 3), st.booleans(), st.integers(0, 2**63 - 1)
)  # fmt: skip
everything = st.builds(
    StepTelemetry,
    leaves=counts,
    data_s=seconds,
    compute_s=seconds,
    last=st.builds(Seconds, data=seconds, compute=seconds, exchange=seconds, waiting=seconds, other=seconds),
    newest_generation=counts,
    first_of_host=counts,
    compared=st.builds(
        Compared,
        arithmetic=st.integers(0, 2**32 - 1),
        compared_step=counts,
        state_digest=digests,
        own_leaf=counts,
        own_digest=digests,
        other_leaf=counts,
        other_digest=digests,
    ),
    checkpoint=reports,
)


@given(everything)
def test_telemetry_arrives_as_it_was_sent(telemetry: StepTelemetry) -> None:
    """Every bit of a digest, and whole numbers as whole numbers."""
    packed = telemetry.pack()
    assert len(packed) == TELEMETRY_BYTES
    assert StepTelemetry.unpack(packed) == telemetry


def test_a_member_that_says_nothing_compares_nothing() -> None:
    found = StepTelemetry.unpack(StepTelemetry().pack())
    assert found == StepTelemetry()
    assert found.compared.compared_step == found.compared.own_leaf == found.compared.other_leaf == NOT_COMPARED
    assert found.last.total() == 0.0
