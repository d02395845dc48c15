# Times: p plain, o dQ apart, n turns as planned; n<G>.<M>l<L>: G pairs mixed, M times as many last pairs, lag of L steps.
nvidia-smi -L
timeout 40 ./bench 5 6 0 p,o,n,n4,n8,n16,n24,n16.2,n16l2 8:2048:32:32:64:1
timeout 40 ./bench 5 6 0 p,o,n,n4,n8,n12,n8l2,n8l3,n16l3 8:2048:32:32:64:0 8:2048:16:16:128:0
timeout 40 ./bench 5 6 0 p,o,n,n4,n8.2 8:2048:16:16:128:1
timeout 40 ./bench 5 6 0 p,o,n,n32,n66,n132 32:512:32:32:64:1 32:512:32:32:64:0 32:512:16:16:128:1 32:512:16:16:128:0
timeout 60 ./bench 3 8 0 p,o,n,n2,n4,n8 2:8192:32:32:64:1 2:8192:32:32:64:0 2:8192:16:16:128:1 2:8192:16:16:128:0 1:16384:32:32:64:1 1:16384:16:16:128:1 4:4096:32:8:128:1
timeout 60 ./bench 3 8 0 p,o,n,n2,n4,n2l3 1:16384:32:32:64:0 1:16384:16:16:128:0
timeout 20 ./bench 5 4 0 p,o,n,n2 2:2048:8:8:128:1 1:2048:16:16:64:1 1:4096:8:8:128:0
