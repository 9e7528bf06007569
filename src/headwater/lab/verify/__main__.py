"""The other process of the restart case."""

from headwater.lab.verify.cases import main

main()
