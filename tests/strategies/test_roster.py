"""Who takes part, and in which order."""

from dataclasses import replace

from flower_plugin.strategies.roster import Agreement, make_roster
from hypothesis import given
from hypothesis import strategies as st

from flower_plugin.config import RunConfig
from flower_plugin.messages import Profile

CONFIG = RunConfig(backbone="x")
AGREED = Agreement(fingerprint="f", template="t", num_blocks=2, hidden_size=8, vocab_size=10)


def profile(tenant, order=0, fingerprint="f", labels=("a", "b"), digests=(b"0" * 16,), num_test=0):
    return Profile(
        tenant=tenant,
        order=order,
        plugin_version="1",
        fingerprint=fingerprint,
        model_type="bert",
        num_blocks=2,
        hidden_size=8,
        vocab_size=10,
        template="t",
        digests=digests,
        num_test=num_test,
        label_names=labels,
    )


@given(st.permutations([1, 2, 3, 4]))
def test_the_order_does_not_depend_on_node_ids(nodes):
    profiles = {node: profile(f"device-t{place}", order=place) for place, node in enumerate(nodes)}
    roster = make_roster(profiles, CONFIG, AGREED)
    assert [device.tenant for device in roster.devices] == ["device-t0", "device-t1", "device-t2", "device-t3"]


def test_the_servers_backbone_decides():
    roster = make_roster(
        {1: profile("device-a"), 2: profile("device-b", fingerprint="g")}, CONFIG, replace(AGREED, fingerprint="g")
    )
    assert [device.node_id for device in roster.devices] == [2]
    assert [refusal.node_id for refusal in roster.refusals] == [1]


def test_without_a_backbone_on_the_server_most_devices_decide():
    profiles = {1: profile("device-a", fingerprint="g"), 2: profile("device-b"), 3: profile("device-c")}
    roster = make_roster(profiles, CONFIG, None)
    assert [device.node_id for device in roster.devices] == [2, 3]


def test_numeric_labels_sort_as_numbers():
    roster = make_roster(
        {1: profile("device-a", labels=("10", "2")), 2: profile("device-b", labels=("1",))}, CONFIG, AGREED
    )
    assert roster.label_names == ("1", "2", "10")


def test_a_source_that_knows_its_classes_keeps_their_order():
    roster = make_roster({n: profile(f"device-{n}", labels=("rotten", "fresh")) for n in (1, 2)}, CONFIG, AGREED)
    assert roster.label_names == ("rotten", "fresh")


def test_the_run_config_fixes_the_classes():
    config = RunConfig(backbone="x", label_names="no, yes")
    assert make_roster({1: profile("device-a")}, config, AGREED).label_names == ("no", "yes")


def test_identity_by_node():
    config = RunConfig(backbone="x", identity="node")
    roster = make_roster({1: profile("device-a"), 2: profile("device-a")}, config, AGREED)
    assert [device.tenant for device in roster.devices] == ["node-1", "node-2"]


def test_a_device_with_held_out_samples_only_may_evaluate():
    roster = make_roster(
        {1: profile("device-a", digests=(), num_test=3), 2: profile("device-b", digests=())}, CONFIG, AGREED
    )
    assert [device.node_id for device in roster.devices] == [1]
    assert "no usable sample" in roster.refusals[0].reason


def test_a_device_whose_texts_become_other_tokens_is_refused():
    odd = profile("device-b").model_copy(update={"template": "other", "hidden_size": 16})
    roster = make_roster({1: profile("device-a"), 2: odd}, CONFIG, AGREED)
    assert [device.node_id for device in roster.devices] == [1]
    assert "template other instead of t, hidden size 16 instead of 8" in roster.refusals[0].reason


def test_one_liar_does_not_decide_for_most():
    liar = profile("device-a").model_copy(update={"hidden_size": 64})
    roster = make_roster({1: liar, 2: profile("device-b", order=1), 3: profile("device-c", order=2)}, CONFIG, None)
    assert [device.node_id for device in roster.devices] == [2, 3]


def test_labels_that_only_look_like_numbers_sort_as_text():
    roster = make_roster(
        {1: profile("device-a", labels=("1", "\u00b2")), 2: profile("device-b", labels=("--5", "1"))}, CONFIG, AGREED
    )
    assert roster.label_names == ("--5", "1", "\u00b2")
