"""mpi4py beside muster, in one program."""

from sections import needs, run_section

pytestmark = needs("mpi4py", "openmpi")
# mpirun refuses root otherwise, and more processes than cores.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def test_mpi_and_muster_reduce_in_one_program() -> None:
    run_section("mpi4py", env=ENVIRONMENT)  # the page shows both sums
