# Everything that waits for a device, some 60 to 90 s: times in turns, bits compared with the first variant, then tests.
nvidia-smi -L
B=build-mixed
timeout 40 $B/bench_mixed mixed bf16,fp8,int8,int8_int4,int4 0,128,118,110,103,96 8
timeout 30 $B/bench_narrow spec8 bf16,fp8,int8,int8_int4,int4 W,0 8
timeout 20 $B/bench_narrow specragged int8,int4 W,0 6
timeout 20 $B/bench_narrow spec8few int8,int4 W,0 6
timeout 30 $B/bench_beside mixed bf16,fp8,int8,int8_int4,int4 0 6
timeout 60 $B/test_drafts --gtest_filter='*Drafts*' --gtest_brief=1 2>&1 | tail -20
