"""The other process of the restart case."""

from headwater.verify.cases import main

main()
