"""torchft over muster.process_group(): a replica dies in a step, and its replacement joins."""

from launching import free_port
from sections import losses, needs, run_section

pytestmark = needs("torchft")


def test_a_replica_is_replaced() -> None:
    port = str(free_port())

    def muster(code: str) -> str:
        return code.replace("29510", port)

    def undisturbed_gloo(code: str) -> str:
        code = (
            code.replace("29510", port).replace("FAILS=1 ", "").replace("(ProcessGroupMuster()", "(ProcessGroupGloo()")
        )
        return code.replace("import ProcessGroupWrapper", "import ProcessGroupGloo, ProcessGroupWrapper")

    output = run_section("torchft", muster)
    assert output.count("was ended by signal 9") == 1, output
    assert losses(output) == losses(run_section("torchft", undisturbed_gloo))
    assert len(set(losses(output))) == 1
