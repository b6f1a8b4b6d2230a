"""``python -m streamer``"""

from streamer.cli.main import main

main()
