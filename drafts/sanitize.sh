# memcheck and racecheck of a few; needs compute-sanitizer in PATH.
cd "$(dirname "$0")"
for v in 1 2; do for t in memcheck racecheck; do timeout 120 compute-sanitizer --tool $t ./test$v --gtest_brief=1 --gtest_filter=All/CudaBackwardTest.AgainstTheCpu/73:All/CudaBackwardTest.AgainstTheCpu/76:All/CudaBackwardTest.AgainstTheCpu/91:All/CudaBackwardTest.AgainstTheCpu/94:All/CudaBackwardTest.AgainstTheCpu/181:All/CudaBackwardTest.AgainstTheCpu/184:All/CudaBackwardTest.AgainstTheCpu/199:All/CudaBackwardTest.AgainstTheCpu/202 2>&1 | tail -15 | cut -c1-250; done; done
