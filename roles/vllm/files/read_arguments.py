"""Has vLLM's own parser read a command line, and ends: with 0 where it takes every word, else with 2 and its reason.

Run by the release's own Python with the arguments of ``vllm.entrypoints.openai.api_server``. It needs neither model nor card.
"""

import sys


def read(arguments: "list[str]") -> None:
    """Parse as the server does, rules between arguments included where the version has them.

    Raises:
        SystemExit: the parser refuses them; it has said why.
    """
    from vllm.entrypoints.openai import cli_args

    try:
        from vllm.utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    parser = cli_args.make_arg_parser(FlexibleArgumentParser(prog="vllm"))
    parsed = parser.parse_args(arguments)
    validate = getattr(cli_args, "validate_parsed_serve_args", None)
    if validate is not None:
        try:
            validate(parsed)
        except (TypeError, ValueError) as error:
            parser.error(str(error))


if __name__ == "__main__":
    read(sys.argv[1:])
