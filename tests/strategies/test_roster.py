"""Who takes part, and in which order."""

from flower_plugin.strategies.roster import make_roster
from hypothesis import given
from hypothesis import strategies as st

from flower_plugin.config import RunConfig
from flower_plugin.messages import Profile

CONFIG = RunConfig(backbone="x")


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
    profiles = {node: profile(f"t{place}", order=place) for place, node in enumerate(nodes)}
    roster = make_roster(profiles, CONFIG, "f")
    assert [device.tenant for device in roster.devices] == ["t0", "t1", "t2", "t3"]


def test_the_servers_backbone_decides():
    roster = make_roster({1: profile("a"), 2: profile("b", fingerprint="g")}, CONFIG, "g")
    assert [device.node_id for device in roster.devices] == [2]
    assert [refusal.node_id for refusal in roster.refusals] == [1]


def test_without_a_backbone_on_the_server_most_devices_decide():
    profiles = {1: profile("a", fingerprint="g"), 2: profile("b"), 3: profile("c")}
    roster = make_roster(profiles, CONFIG, None)
    assert [device.node_id for device in roster.devices] == [2, 3]


def test_numeric_labels_sort_as_numbers():
    roster = make_roster({1: profile("a", labels=("10", "2")), 2: profile("b", labels=("1",))}, CONFIG, "f")
    assert roster.label_names == ("1", "2", "10")


def test_a_source_that_knows_its_classes_keeps_their_order():
    roster = make_roster({n: profile(str(n), labels=("rotten", "fresh")) for n in (1, 2)}, CONFIG, "f")
    assert roster.label_names == ("rotten", "fresh")


def test_the_run_config_fixes_the_classes():
    config = RunConfig(backbone="x", label_names="no, yes")
    assert make_roster({1: profile("a")}, config, "f").label_names == ("no", "yes")


def test_identity_by_node():
    config = RunConfig(backbone="x", identity="node")
    roster = make_roster({1: profile("a"), 2: profile("a")}, config, "f")
    assert [device.tenant for device in roster.devices] == ["node-1", "node-2"]


def test_a_device_with_held_out_samples_only_may_evaluate():
    roster = make_roster({1: profile("a", digests=(), num_test=3), 2: profile("b", digests=())}, CONFIG, "f")
    assert [device.node_id for device in roster.devices] == [1]
    assert "no usable sample" in roster.refusals[0].reason
