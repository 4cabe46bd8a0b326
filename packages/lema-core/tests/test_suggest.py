from lema_core.suggest import did_you_mean, unknown_name


def test_near_match_is_offered() -> None:
    assert did_you_mean("learning_rat", ["learning_rate", "seed"]) == "; did you mean 'learning_rate'?"


def test_case_and_dashes_do_not_count() -> None:
    assert did_you_mean("Learning-Rate", ["learning_rate"]) == "; did you mean 'learning_rate'?"


def test_nothing_close_adds_nothing() -> None:
    assert did_you_mean("zzz", ["learning_rate", "seed"]) == ""
    assert did_you_mean("anything", []) == ""


def test_unknown_name_lists_what_exists_once_and_in_order() -> None:
    line = unknown_name("kernel", "torhc", ["torch", "cpp", "torch"])
    assert line == "unknown kernel 'torhc'; known: cpp, torch; did you mean 'torch'?"
    assert unknown_name("kernel", "torch", []) == "unknown kernel 'torch'; known: none"
