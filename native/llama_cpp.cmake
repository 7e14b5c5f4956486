# What Headrace adds to the build of llama.cpp. CMake reads it at the end of `project("ggml" …)`, because scripts/engine.py
# sets CMAKE_PROJECT_ggml_INCLUDE to it: whatever flags and arguments the user has stay theirs.
add_compile_options(
    "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:SHELL:-include \"${CMAKE_CURRENT_LIST_DIR}/amx_tileconfig.h\">")
