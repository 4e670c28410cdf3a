// Calls the operators that standard input asks for, and writes what comes of it: see torch_stand_in.h.

#include "torch_stand_in.h"

int main() {
  std::ios::sync_with_stdio(false);
  while (std::cin.peek() != std::char_traits<char>::eof()) {
    std::string name(torch::stable::read_number<int64_t>(), ' ');
    std::cin.read(name.data(), static_cast<std::streamsize>(name.size()));
    torch::stable::Library::operators().at(name)();
  }
}
