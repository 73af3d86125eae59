"""python -m launch.quickstart.check_overrides CONFIG [key=value ...]: refuse bad overrides before minutes of work.

For launch/quickstart.sh, which makes the model and the datasets first: those in CONFIG need not be there yet, those
named by an override must. Exit code 0 when all is well, else 2 and one line on stderr that says what is wrong.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from common.config.checks import problems, resolve_paths
from common.config.loading import load_config
from common.errors import EXIT_DONE, ConfigError, UsageError
from rollout_fleet.environments.description import check_environment

MADE_LATER = ("model.path", "tasks.dataset", "evaluation.datasets")


def main(words: Sequence[str]) -> int:
    """Exit code; `words` are the config file and its overrides."""
    file, *overrides = words
    named = {word.partition("=")[0] for word in overrides}
    try:
        config = resolve_paths(load_config(Path(file), overrides))
        for problem in problems(config):
            if problem.key in named or problem.key not in MADE_LATER:
                raise ConfigError(file, *problem)
        check_environment(config.tasks, file, libraries=False)
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
