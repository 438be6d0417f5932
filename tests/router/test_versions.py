from dataclasses import replace

import pytest

from router.config import ClusterAccess, RouterConfig
from router.requests.versions import ModelVersions
from router.workers.members import Members, version_of
from tests.harness.served import LAYOUT, served_model
from wire.errors import ModelReplaced

FULL = served_model()
CODES = served_model(replace(LAYOUT, quantization="int8"), dtype="float32")


def test_an_answer_goes_on_in_the_codes_of_kv_that_it_began_with() -> None:
    """Both versions have the same weights, and so the same fingerprint."""
    assert FULL.fingerprint_hex == CODES.fingerprint_hex
    members = Members(*version_of(FULL))
    versions = ModelVersions(RouterConfig(model=FULL, cluster=ClusterAccess("token", "00" * 32)), members)
    versions.replace((CODES, FULL))
    for model in (FULL, CODES):
        assert versions.choose(model.version_hex).model == model
    assert FULL.version_hex == FULL.fingerprint_hex, "as it was told before"
    versions.replace((CODES,))
    with pytest.raises(ModelReplaced):
        versions.choose(FULL.version_hex)
