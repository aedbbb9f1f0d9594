# Proof of what clients see: histories of concurrent clients, checked for linearisability, with faults injected.
add_library(muster_linear STATIC linear_check.cpp store_model.cpp)
target_include_directories(muster_linear PUBLIC ${PROJECT_SOURCE_DIR}/tests)
target_link_libraries(muster_linear PUBLIC muster::store PRIVATE fmt::fmt-header-only muster_flags)
muster_test(store_linear_check_test SOURCES linear_check_test.cpp LINK muster_linear)
