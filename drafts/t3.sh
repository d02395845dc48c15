# Correctness: about 40 s.
nvidia-smi -L
timeout 60 ./test --gtest_filter='*InTurnsAgainstTheCpu*' 2>&1 | grep -v "SKIPPED\|OK \]\|RUN\|take turns\|Skipped" | tail -15
timeout 60 ./bench 0 1 100 p 2:700:96:96:64:1 2:700:96:96:128:0 1:4096:16:4:128:1
timeout 90 compute-sanitizer --tool memcheck ./test --gtest_filter='*InTurns*' 2>&1 | tail -2
timeout 90 compute-sanitizer --tool racecheck ./test --gtest_filter='*InTurns*/1:*InTurns*/74' 2>&1 | tail -8
