"""The contract of movers. Each check takes a Subject and raises ContractViolation."""

from pdtx.testing.contract.cancels import check_cancels_in_a_queue, check_get_cancels_in_a_queue
from pdtx.testing.contract.ends import (
    check_cancel,
    check_close_with_work_pending,
    check_consumer_closes,
    check_deadline,
    check_done_means_arrived,
    check_times_are_ordered,
)
from pdtx.testing.contract.faults import FAULTS
from pdtx.testing.contract.gets import (
    check_close_with_gets_pending,
    check_consumer_closes_under_gets,
    check_get_cancel,
    check_get_deadline,
    check_get_every_layout_pair,
    check_get_of_another_size,
    check_get_outside,
    check_get_with_a_failing_receiver,
    check_get_without_offer,
    check_gets_and_puts_mixed,
    check_large_get,
    check_partial_and_empty_gets,
)
from pdtx.testing.contract.leaks import (
    check_addresses,
    check_hundreds_of_connections,
    check_nothing_left,
    check_sessions_end_is_heard,
)
from pdtx.testing.contract.notices import (
    check_many_notices,
    check_notice_after_a_refusal,
    check_notice_deadline,
    check_notice_is_heard_when_done,
    check_notice_sizes,
    check_notice_to_a_failing_receiver,
    check_notices_follow_puts,
)
from pdtx.testing.contract.payloads import (
    check_empty_transfer,
    check_every_layout_pair,
    check_layer_by_layer,
    check_many_at_once,
    check_many_at_once_over_several_peers,
    check_many_ranges_in_one_call,
    check_partial_ranges,
    check_path,
    check_register_twice,
    check_several_consumers,
    check_several_producers,
    check_staged,
    check_staged_in_pieces,
    check_two_connections_of_one_session,
)
from pdtx.testing.contract.refusals import (
    check_failing_receiver,
    check_no_grant,
    check_other_sessions_grant,
    check_placement_outside,
    check_size_differs,
    check_source_outside,
    check_wrong_token,
)
from pdtx.testing.contract.subject import Check, Subject, require_works, soon, start, start_get
from pdtx.testing.pair import LISTEN_AT, MakeMover

CONTRACT: tuple[Check, ...] = (
    check_every_layout_pair,
    check_partial_ranges,
    check_many_ranges_in_one_call,
    check_many_at_once,
    check_layer_by_layer,
    check_several_producers,
    check_several_consumers,
    check_many_at_once_over_several_peers,
    check_empty_transfer,
    check_staged,
    check_staged_in_pieces,
    check_path,
    check_register_twice,
    check_two_connections_of_one_session,
    check_done_means_arrived,
    check_times_are_ordered,
    check_cancel,
    check_cancels_in_a_queue,
    check_deadline,
    check_close_with_work_pending,
    check_consumer_closes,
    check_wrong_token,
    check_no_grant,
    check_other_sessions_grant,
    check_size_differs,
    check_placement_outside,
    check_source_outside,
    check_failing_receiver,
    check_get_every_layout_pair,
    check_large_get,
    check_partial_and_empty_gets,
    check_gets_and_puts_mixed,
    check_get_without_offer,
    check_get_of_another_size,
    check_get_outside,
    check_get_cancel,
    check_get_cancels_in_a_queue,
    check_get_deadline,
    check_get_with_a_failing_receiver,
    check_close_with_gets_pending,
    check_consumer_closes_under_gets,
    check_notices_follow_puts,
    check_notice_after_a_refusal,
    check_notice_sizes,
    check_many_notices,
    check_notice_is_heard_when_done,
    check_notice_to_a_failing_receiver,
    check_notice_deadline,
    check_addresses,
    check_nothing_left,
    check_sessions_end_is_heard,
    check_hundreds_of_connections,
)
"""Every check within one process, the fastest way to a broken mover first."""


def check_mover(make_mover: MakeMover, listen_at: str = LISTEN_AT) -> None:
    """Hold a mover to the whole contract within this process; make_mover is called for every node of every check.

    Raises ContractViolation, saying which check failed and how.
    """
    for check in CONTRACT:
        check(Subject(make_mover, listen_at))


def check_faults(name: str, listen_at: str = LISTEN_AT, **options: object) -> None:
    """Hold a mover that make_mover() knows to what must happen when its peer is killed or stopped.

    Raises ContractViolation, as check_mover does.
    """
    for check in FAULTS:
        check(Subject.named(name, listen_at, **options))


__all__ = [
    "CONTRACT",
    "FAULTS",
    "Check",
    "Subject",
    "check_faults",
    "check_mover",
    "require_works",
    "soon",
    "start",
    "start_get",
]
