from tests.deploy.conftest import _signals_are_heard, run_folder, state_home

__all__ = ["_signals_are_heard", "run_folder", "state_home"]
